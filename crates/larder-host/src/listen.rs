//! Listening address of `larder host`, and its access control.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use larder_block::tls::{ServerTls, TlsError};
use larder_vm::listen::{self, ListenError};

use crate::auth::{Token, TokenError};
use crate::balance_loop::BalanceConfig;
use crate::token_file::{TokenFileError, default_token};

/// Default listening address. Port 9177 belongs to libvirt exporters.
pub const LISTEN_DEFAULT: ListenAddress = ListenAddress::Tcp(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9178));

/// Address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// TCP address and port. Clients must present the token.
    Tcp(SocketAddr),
    /// Path of a unix socket. The mode of its file decides which users can connect.
    Unix(PathBuf),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix("unix:").unwrap_or(text);
        if path.contains('/') {
            return Ok(Self::Unix(PathBuf::from(path)));
        }
        let address = text.parse().map(Self::Tcp);
        address.map_err(|_| {
            "give an address with a port, as in 127.0.0.1:9178, or the path of a unix socket with a / in it".to_owned()
        })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// Configuration of `larder host`.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Address to listen on.
    pub listen: ListenAddress,
    /// Mode, owner and group of a unix socket.
    pub socket: listen::Access,
    /// Directory of `server-cert.pem` and `server-key.pem`.
    pub tls_certificates: Option<PathBuf>,
    /// File with the token that clients must present. Without this file TCP uses a token that is created once.
    pub token_file: Option<PathBuf>,
    /// Configuration of the balancing of memory budgets; `None` disables it.
    pub balance: Option<BalanceConfig>,
}

/// Error that prevents `larder host` from starting.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum HostError {
    #[error(
        "--listen {listen}: the token would cross the network unencrypted. Give --tls-certificates; or listen on 127.0.0.1, and reach it from other hosts through ssh -L"
    )]
    Unencrypted { listen: SocketAddr },
    #[error("--listen {}: a unix socket has no TLS; leave out --tls-certificates", path.display())]
    TlsOnUnix { path: PathBuf },
    #[error(
        "--socket-mode, --socket-owner and --socket-group need a unix socket, and --listen {listen} is a TCP address; give a path, or leave them out"
    )]
    SocketOptionsOnTcp { listen: SocketAddr },
    #[error("--tls-certificates: {0}")]
    Tls(#[from] TlsError),
    #[error("--token-file: {0}")]
    Token(#[from] TokenError),
    #[error(
        "{0}; name another file with --token-file, or listen on a unix socket (--listen PATH), which needs no token"
    )]
    DefaultToken(#[from] TokenFileError),
    #[error("cannot listen on {listen}: {source}")]
    Listen { listen: SocketAddr, source: io::Error },
    #[error("--listen: {0}")]
    Socket(#[from] ListenError),
    #[error("--balance-memory: the host's free memory cannot be determined: /proc/meminfo: {0}")]
    Memory(io::Error),
    #[error("{0}")]
    Start(io::Error),
}

/// Credentials that control access.
pub(crate) struct AccessControl {
    pub(crate) tls: Option<ServerTls>,
    pub(crate) token: Option<Token>,
    /// File of the token.
    pub(crate) token_file: Option<PathBuf>,
}

impl HostConfig {
    /// Loads the certificates and the token that access control needs.
    pub(crate) fn access(&self) -> Result<AccessControl, HostError> {
        match &self.listen {
            ListenAddress::Tcp(listen) if self.socket != listen::Access::default() => {
                return Err(HostError::SocketOptionsOnTcp { listen: *listen });
            }
            ListenAddress::Tcp(listen) if !is_loopback(listen.ip()) && self.tls_certificates.is_none() => {
                return Err(HostError::Unencrypted { listen: *listen });
            }
            ListenAddress::Unix(path) if self.tls_certificates.is_some() => {
                return Err(HostError::TlsOnUnix { path: path.clone() });
            }
            ListenAddress::Tcp(_) | ListenAddress::Unix(_) => {}
        }
        let load = |directory: &PathBuf| ServerTls::load_directory(directory, false);
        let tls = self.tls_certificates.as_ref().map(load).transpose()?;
        let (token, token_file) = match (&self.token_file, &self.listen) {
            (Some(path), _) => (Some(Token::read(path)?), Some(path.clone())),
            (None, ListenAddress::Tcp(_)) => {
                let (token, path) = default_token()?;
                (Some(token), Some(path))
            }
            (None, ListenAddress::Unix(_)) => (None, None),
        };
        Ok(AccessControl { tls, token, token_file })
    }
}

pub(crate) fn is_loopback(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback(),
        IpAddr::V6(address) => {
            address.is_loopback() || address.to_ipv4_mapped().is_some_and(|address| address.is_loopback())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path has a slash, and an address has none.
    #[test]
    fn addresses_and_paths_are_distinguished() {
        let unix = |path: &str| Ok(ListenAddress::Unix(path.into()));
        assert_eq!("unix:/run/x.sock".parse(), unix("/run/x.sock"));
        assert_eq!("/run/x.sock".parse(), unix("/run/x.sock"));
        assert_eq!("./x.sock".parse(), unix("./x.sock"));
        assert_eq!(LISTEN_DEFAULT.to_string().parse(), Ok(LISTEN_DEFAULT));
        assert!(matches!("[::1]:9178".parse(), Ok(ListenAddress::Tcp(_))));
        for wrong in ["9178", "localhost", "x.sock", ""] {
            assert!(wrong.parse::<ListenAddress>().is_err(), "{wrong}");
        }
    }
}

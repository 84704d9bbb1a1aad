//! Where is listened, and for whom.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use larder_block::tls::{ServerTls, TlsError};

use crate::auth::{Token, TokenError};
use crate::balancing::BalanceConfig;

/// Where is listened unless something else is said. 9177 is libvirt exporters'.
pub const LISTEN_DEFAULT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9178);

/// What is served, to whom.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// The address and port.
    pub listen: SocketAddr,
    /// The folder of `server-cert.pem` and `server-key.pem`.
    pub tls_certificates: Option<PathBuf>,
    /// The file with the token that clients must know.
    pub token_file: Option<PathBuf>,
    /// How budgets of VMs' memory are moved, if they are.
    pub balance: Option<BalanceConfig>,
}

/// Why nothing is served.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum HostError {
    #[error(
        "--listen {listen}: other hosts could look in there. Give --tls-certificates and --token-file, both; or listen on 127.0.0.1, and reach it from elsewhere through ssh -L"
    )]
    Open { listen: SocketAddr },
    #[error("--tls-certificates: {0}")]
    Tls(#[from] TlsError),
    #[error("--token-file: {0}")]
    Token(#[from] TokenError),
    #[error("cannot listen on {listen}: {source}")]
    Listen { listen: SocketAddr, source: io::Error },
    #[error("--balance-memory: it cannot be told what the host has free: /proc/meminfo: {0}")]
    Memory(io::Error),
    #[error("{0}")]
    Start(io::Error),
}

/// Who may look.
pub(crate) struct Access {
    pub(crate) tls: Option<ServerTls>,
    pub(crate) token: Option<Token>,
}

impl HostConfig {
    /// Reads what is needed to keep others out.
    pub(crate) fn access(&self) -> Result<Access, HostError> {
        let is_alone = is_loopback(self.listen.ip());
        if !is_alone && (self.tls_certificates.is_none() || self.token_file.is_none()) {
            return Err(HostError::Open { listen: self.listen });
        }
        let load = |folder: &PathBuf| ServerTls::load_folder(folder, false);
        Ok(Access {
            tls: self.tls_certificates.as_ref().map(load).transpose()?,
            token: self.token_file.as_deref().map(Token::read).transpose()?,
        })
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

//! Who the two hosts are to one another: TLS 1.3, with a certificate on both sides.
//!
//! The files are those that QEMU, libvirt and `larder disk serve` have, in one folder, since a host sends as well as it
//! receives: `ca-cert.pem`; `client-cert.pem` and `client-key.pem` for what it sends; `server-cert.pem` and
//! `server-key.pem` for what it receives. A sender wants a certificate for the name or address that it connects to.
//!
//! With pins, only a peer with one of these certificates will do, whatever else the authority has signed.

use std::path::Path;
use std::sync::Arc;

use larder_block::tls::{TlsError, authorities, certificates, private_key, provider};
use ring::digest;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ServerConfig};
use thiserror::Error;

/// The SHA-256 of a certificate in DER.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin([u8; 32]);

/// Text that is no pin.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "'{0}' is no fingerprint: it is what 'openssl x509 -noout -fingerprint -sha256 -in CERTIFICATE' says, 64 hexadecimal digits, with or without colons"
)]
pub struct NoPin(String);

impl std::str::FromStr for Pin {
    type Err = NoPin;

    fn from_str(text: &str) -> Result<Self, NoPin> {
        // `openssl` says `sha256 Fingerprint=` before it.
        let digits: Vec<u8> = text
            .rsplit('=')
            .next()
            .unwrap_or(text)
            .bytes()
            .filter(|&byte| byte != b':')
            .map(|byte| char::from(byte).to_digit(16).map(|digit| digit as u8))
            .collect::<Option<_>>()
            .ok_or_else(|| NoPin(text.to_owned()))?;
        let bytes: Vec<u8> = digits
            .chunks(2)
            .map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit))
            .collect();
        match bytes.try_into() {
            Ok(bytes) if digits.len() == 64 => Ok(Self(bytes)),
            _ => Err(NoPin(text.to_owned())),
        }
    }
}

/// The peer is none of those that are wanted.
#[derive(Debug, Error)]
#[error("the other side's certificate has the fingerprint {0}, which is none of those that were given")]
pub struct WrongPeer(String);

/// How a sender shows and asks who it is.
#[derive(Clone)]
pub struct SenderTls {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
    pins: Vec<Pin>,
}

impl SenderTls {
    /// With the files of `folder`, for a receiver named `host`.
    ///
    /// # Errors
    /// A file is missing or damaged, or the name is none.
    pub fn load(folder: &Path, host: &str, pins: Vec<Pin>) -> Result<Self, TlsError> {
        let server = ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Name { name: host.to_owned() })?;
        let path = folder.join("client-cert.pem");
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Setup)?
            .with_root_certificates(authorities(&folder.join("ca-cert.pem"))?)
            .with_client_auth_cert(certificates(&path)?, private_key(&folder.join("client-key.pem"))?)
            .map_err(|source| TlsError::Certificate { path, source })?;
        // A lane only writes: nobody would read what comes to resume a session by.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self {
            config: Arc::new(config),
            server,
            pins,
        })
    }

    pub(crate) fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.config)
    }

    pub(crate) fn server(&self) -> ServerName<'static> {
        self.server.clone()
    }

    pub(crate) fn check(&self, shown: Option<&[CertificateDer<'_>]>) -> Result<(), WrongPeer> {
        check(&self.pins, shown)
    }
}

/// How a receiver shows and asks who it is.
#[derive(Clone)]
pub struct ReceiverTls {
    config: Arc<ServerConfig>,
    pins: Vec<Pin>,
}

impl ReceiverTls {
    /// With the files of `folder`.
    ///
    /// # Errors
    /// A file is missing or damaged.
    pub fn load(folder: &Path, pins: Vec<Pin>) -> Result<Self, TlsError> {
        let ca = folder.join("ca-cert.pem");
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(authorities(&ca)?), provider())
            .build()
            .map_err(|source| TlsError::Authorities { path: ca, source })?;
        let path = folder.join("server-cert.pem");
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Setup)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates(&path)?, private_key(&folder.join("server-key.pem"))?)
            .map_err(|source| TlsError::Certificate { path, source })?;
        config.send_tls13_tickets = 0;
        Ok(Self {
            config: Arc::new(config),
            pins,
        })
    }

    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }

    pub(crate) fn check(&self, shown: Option<&[CertificateDer<'_>]>) -> Result<(), WrongPeer> {
        check(&self.pins, shown)
    }
}

fn check(pins: &[Pin], shown: Option<&[CertificateDer<'_>]>) -> Result<(), WrongPeer> {
    if pins.is_empty() {
        return Ok(());
    }
    let shown = shown
        .and_then(|chain| chain.first())
        .map(|certificate| digest::digest(&digest::SHA256, certificate));
    let matches = |pin: &Pin| shown.as_ref().is_some_and(|shown| shown.as_ref() == pin.0);
    if pins.iter().any(matches) {
        return Ok(());
    }
    let text = shown.map_or_else(
        || "none".to_owned(),
        |shown| shown.as_ref().iter().map(|byte| format!("{byte:02x}")).collect(),
    );
    Err(WrongPeer(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_read_as_openssl_writes_it() {
        let plain = "0123456789abcdef".repeat(4);
        let with_colons: Vec<String> = plain
            .to_uppercase()
            .as_bytes()
            .chunks(2)
            .map(|pair| String::from_utf8_lossy(pair).into_owned())
            .collect();
        let with_colons = with_colons.join(":");
        for said in [&with_colons, &format!("sha256 Fingerprint={with_colons}")] {
            assert_eq!(said.parse::<Pin>(), plain.parse());
        }
        for wrong in ["", "ab", &plain[1..], &format!("{plain}0"), &plain.replace('0', "g")] {
            assert!(wrong.parse::<Pin>().is_err(), "{wrong}");
        }
    }
}

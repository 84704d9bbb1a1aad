//! TLS for streams on the loop: certificates from PEM files, and [`MaybeTlsStream`], a socket that may be encrypted.
//!
//! TLS 1.2 and 1.3 by rustls, with certificates only (it has no pre-shared keys). The trusted authorities come from
//! files with the names that libnbd, QEMU and nbdkit use: `ca-cert.pem`, `server-cert.pem`, `server-key.pem`,
//! `client-cert.pem`, `client-key.pem`.

mod stream;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::opener::{self, Access, PathSource, opener};
use crate::small_file::{self, CONFIG_BYTES_MAX};

pub use stream::MaybeTlsStream;

/// The reason why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TlsError {
    #[error("cannot read {what} from {}: {source}", path.display())]
    Pem { what: &'static str, path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("{} contains no certificate; it should be a PEM file", path.display())]
    NoCertificate { path: PathBuf },
    #[error(
        "no list of trusted certificate authorities was found on this host ({tried}); specify a directory that contains ca-cert.pem"
    )]
    NoAuthorities { tried: String },
    #[error("the certificate in {} is not usable: {source}", path.display())]
    Certificate { path: PathBuf, source: rustls::Error },
    #[error("the certificate authorities in {} are not usable: {source}", path.display())]
    Authorities { path: PathBuf, source: rustls::server::VerifierBuilderError },
    #[error("'{name}' is neither a host name nor an address, so no certificate can be valid for it")]
    Name { name: String },
    #[error("TLS: {0}")]
    Setup(rustls::Error),
    #[error("the TLS handshake failed: {0}")]
    Handshake(std::io::Error),
}

/// A client's TLS configuration: trusted authorities, and its own certificate.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

/// The paths where hosts keep their trusted authorities.
pub const HOST_AUTHORITIES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem"];

impl ClientTls {
    /// Loads a configuration that trusts the authorities in `directory/ca-cert.pem`, or the host's if `directory` is
    /// `None`, for a server that presents a certificate for `server`. Presents `directory/client-cert.pem` if it
    /// exists.
    ///
    /// # Errors
    /// A file is missing or damaged, or `server` is not a valid name.
    pub fn load(directory: Option<&Path>, server: &str) -> Result<Self, TlsError> {
        let server = ServerName::try_from(server.to_owned()).map_err(|_| TlsError::Name { name: server.to_owned() })?;
        let roots = match directory {
            Some(directory) => authorities(&directory.join("ca-cert.pem"))?,
            None => host_authorities()?,
        };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Setup)?
            .with_root_certificates(roots);
        let client_files = directory
            .map(|directory| (directory.join("client-cert.pem"), directory.join("client-key.pem")))
            .filter(|(certificate, _)| opener::metadata(certificate).is_ok());
        let config = match client_files {
            None => builder.with_no_client_auth(),
            Some((path, key)) => builder
                .with_client_auth_cert(certificates(&path)?, private_key(&key)?)
                .map_err(|source| TlsError::Certificate { path, source })?,
        };
        Ok(Self { config: Arc::new(config), server })
    }
}

/// A server's TLS configuration: its certificate, and the authorities of accepted clients.
#[derive(Clone)]
pub struct ServerTls {
    config: Arc<ServerConfig>,
}

impl ServerTls {
    /// Loads a configuration that presents the certificate chain in `certificate`, whose key is in `key`. With
    /// `client_authorities`, only clients with a certificate from one of them are accepted.
    ///
    /// # Errors
    /// A file is missing or damaged, or key and certificate do not match.
    pub fn load(certificate: &Path, key: &Path, client_authorities: Option<&Path>) -> Result<Self, TlsError> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Setup)?;
        let builder = match client_authorities {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = Arc::new(authorities(path)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
                    .build()
                    .map_err(|source| TlsError::Authorities { path: path.to_owned(), source })?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config = builder
            .with_single_cert(certificates(certificate)?, private_key(key)?)
            .map_err(|source| TlsError::Certificate { path: certificate.to_owned(), source })?;
        Ok(Self { config: Arc::new(config) })
    }

    /// Loads `server-cert.pem` and `server-key.pem` from `directory`, and with `require_clients` the clients'
    /// authorities from `ca-cert.pem`.
    ///
    /// # Errors
    /// See [`ServerTls::load`].
    pub fn load_directory(directory: &Path, require_clients: bool) -> Result<Self, TlsError> {
        let authorities = directory.join("ca-cert.pem");
        Self::load(
            &directory.join("server-cert.pem"),
            &directory.join("server-key.pem"),
            require_clients.then_some(&authorities),
        )
    }

    /// Returns the configuration for servers that are not on the loop.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }
}

/// Returns the cryptography provider that all TLS connections of Larder use.
pub fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Loads a chain of certificates, the owner's first.
///
/// # Errors
/// The file is missing, damaged or has no certificate.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |source| TlsError::Pem { what: "certificates", path: path.to_owned(), source };
    let text = read(path).map_err(|error| failed(pem::Error::Io(error)))?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(failed)?;
    if found.is_empty() {
        return Err(TlsError::NoCertificate { path: path.to_owned() });
    }
    Ok(found)
}

/// Loads the private key of a certificate.
///
/// # Errors
/// The file is missing, damaged or has no key.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let text = read(path).map_err(pem::Error::Io);
    let key = text.and_then(|text| PrivateKeyDer::from_pem_slice(&text));
    key.map_err(|source| TlsError::Pem { what: "the private key", path: path.to_owned(), source })
}

/// Loads trusted authorities. Unusable ones are omitted, as is usual: lists of hosts contain some.
///
/// # Errors
/// The file is missing, damaged or has no usable certificate.
pub fn authorities(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates(path)?);
    if added == 0 {
        return Err(TlsError::NoCertificate { path: path.to_owned() });
    }
    Ok(roots)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    small_file::read_open(opener().open(path, Access::Read, PathSource::User)?, CONFIG_BYTES_MAX)
}

fn host_authorities() -> Result<RootCertStore, TlsError> {
    let path = HOST_AUTHORITIES
        .iter()
        .map(Path::new)
        .find(|path| opener::metadata(path).is_ok())
        .ok_or_else(|| TlsError::NoAuthorities { tried: HOST_AUTHORITIES.join(", ") })?;
    authorities(path)
}

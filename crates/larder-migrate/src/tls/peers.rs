//! Identity of the host at the other end: peers given by the user, or certificates recorded at the first connection.
//!
//! The authority's signature shows that a certificate belongs to one of its hosts, and a sender checks that it is for
//! the name that it connects to. In addition, each host is identified by the key of its certificate: a
//! [`Fingerprint`] of it is recorded at the first connection, and another key is refused later.
//!
//! ```text
//! # comment
//! HOST FINGERPRINT
//! ```
//! HOST is the `--to` argument of a sender, or the address that a receiver sees. Several lines of one host are
//! alternatives. The file is replaced as a whole, in a directory that no other user can write to, under a lock
//! (flock(2)) of that directory. A file with an invalid line is never replaced, and refuses every peer.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use ring::digest;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, fsync, open, openat, renameat, unlinkat};
use rustix::process::geteuid;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;
use thiserror::Error;

/// Maximum bytes of a file of records.
const RECORDS_BYTES_MAX: u64 = 1 << 20;

/// Header of a new file.
const HEADER: &str =
    "# Hosts, and SHA-256 of the public key of the certificate that each of them has shown to larder migrate.\n";

/// SHA-256 of a public key (SubjectPublicKeyInfo in DER), or of a certificate in DER.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    fn of(der: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest::digest(&digest::SHA256, der).as_ref());
        Self(bytes)
    }

    /// Parses 64 hexadecimal digits, with or without colons.
    fn parse(text: &str) -> Option<Self> {
        let digits: Vec<u8> = text
            .bytes()
            .filter(|&byte| byte != b':')
            .map(|byte| char::from(byte).to_digit(16).map(|digit| digit as u8))
            .collect::<Option<_>>()?;
        if digits.len() != 64 {
            return None;
        }
        let bytes: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();
        bytes.try_into().ok().map(Self)
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

/// Peer named by the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedPeer {
    /// Host with this fingerprint, of its public key or its certificate.
    Fingerprint(Fingerprint),
    /// Host whose certificate is for this name or address.
    Name(ServerName<'static>),
}

/// Error for text that names no peer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "'{0}' is neither a fingerprint nor a name: give the output of 'openssl x509 -noout -fingerprint -sha256 -in CERTIFICATE', 64 \
     hexadecimal digits, with or without colons, or a name or an address that the certificate is for (subjectAltName)"
)]
pub struct InvalidPeer(String);

impl std::str::FromStr for AllowedPeer {
    type Err = InvalidPeer;

    fn from_str(text: &str) -> Result<Self, InvalidPeer> {
        // `openssl` prints `sha256 Fingerprint=` before the fingerprint.
        let word = text.rsplit('=').next().unwrap_or(text);
        if let Some(fingerprint) = Fingerprint::parse(word) {
            return Ok(Self::Fingerprint(fingerprint));
        }
        let invalid = || InvalidPeer(text.to_owned());
        let name = ServerName::try_from(text.to_owned()).map_err(|_| invalid())?;
        // Part of a fingerprint is rejected, although it could be a host name.
        let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':');
        match name {
            ServerName::DnsName(_) if is_hex => Err(invalid()),
            name => Ok(Self::Name(name)),
        }
    }
}

/// Reasons to refuse the other side.
#[derive(Debug, Error)]
pub enum PeerError {
    /// The certificate is missing or cannot be parsed.
    #[error("the other side's certificate cannot be read: {0}")]
    Unreadable(String),
    /// The certificate matches none of the given peers.
    #[error(
        "the other side's certificate has the fingerprint {certificate} (its public key: {key}), which is none of the given ones, \
         and it is for none of the given names (--peer)"
    )]
    NotAllowed {
        /// Fingerprint of the certificate.
        certificate: Fingerprint,
        /// Fingerprint of its public key.
        key: Fingerprint,
    },
    /// Another key is recorded for the host.
    #[error(
        "{host} has shown a certificate with the public key {shown}, and {}:{line} has {known} for it. If that host has a new \
         key, give --peer {shown} once, which replaces that line; if not, another host answers in its place",
        path.display()
    )]
    KeyChanged {
        /// Host whose key is recorded.
        host: String,
        /// Fingerprint of the key that it has shown now.
        shown: Fingerprint,
        /// Fingerprint of the key that it has shown before.
        known: Fingerprint,
        /// File with the record.
        path: PathBuf,
        /// Line of the record, from 1.
        line: usize,
    },
    /// The records cannot be used.
    #[error("{}: {what}; without it no host can be recognised: repair it, or name the other host with --peer", path.display())]
    RecordsUnusable {
        /// File of the records, or its directory.
        path: PathBuf,
        /// Description of the fault.
        what: String,
    },
}

impl PeerError {
    /// Returns the message for the refused side, which reveals nothing of this host's files.
    pub(crate) fn message_for_peer(&self) -> String {
        match self {
            Self::KeyChanged { host, shown, .. } => format!(
                "your certificate has the public key {shown}, and another one is recorded for {host}: the receiver's messages \
                 explain how to accept it"
            ),
            Self::RecordsUnusable { .. } => {
                "it cannot read its records of known hosts: its messages explain why".to_owned()
            }
            Self::Unreadable(_) | Self::NotAllowed { .. } => self.to_string(),
        }
    }
}

/// File of records of the keys that peers of one kind (senders or receivers) have shown.
#[derive(Clone, Debug)]
pub struct PeerRecords {
    directory: PathBuf,
    name: &'static str,
}

/// Line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    host: String,
    key: Fingerprint,
    /// Number of the line, from 1.
    line: usize,
}

impl PeerRecords {
    /// Opens the records of receivers in a directory, which must exist and be writable by this user alone.
    ///
    /// # Errors
    /// [`PeerError::RecordsUnusable`].
    pub fn of_receivers(directory: &Path) -> Result<Self, PeerError> {
        Self::open(directory, "receivers")
    }

    /// Opens the records of senders in a directory, which must exist and be writable by this user alone.
    ///
    /// # Errors
    /// [`PeerError::RecordsUnusable`].
    pub fn of_senders(directory: &Path) -> Result<Self, PeerError> {
        Self::open(directory, "senders")
    }

    fn open(directory: &Path, name: &'static str) -> Result<Self, PeerError> {
        let this = Self { directory: directory.to_owned(), name };
        // The file is read before anything is connected, so that faults are reported in time.
        let opened = this.open_directory()?;
        this.read(&opened)?;
        Ok(this)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> PathBuf {
        self.directory.join(self.name)
    }

    fn failed(&self, what: impl std::fmt::Display) -> PeerError {
        PeerError::RecordsUnusable { path: self.path(), what: what.to_string() }
    }

    fn open_directory(&self) -> Result<File, PeerError> {
        let failed = |what: String| PeerError::RecordsUnusable { path: self.directory.clone(), what };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = open(&self.directory, flags, Mode::empty());
        let directory = File::from(opened.map_err(|error| failed(io::Error::from(error).to_string()))?);
        let found = directory.metadata().map_err(|error| failed(error.to_string()))?;
        if found.uid() != geteuid().as_raw() || found.mode() & 0o022 != 0 {
            return Err(failed("it belongs to another user, or others can write to it".to_owned()));
        }
        Ok(directory)
    }

    fn read(&self, directory: &File) -> Result<Vec<Record>, PeerError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match openat(directory, self.name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT) => return Ok(Vec::new()),
            Err(error) => return Err(self.failed(io::Error::from(error))),
        };
        let is_file = file.metadata().map_err(|error| self.failed(error))?.is_file();
        if !is_file {
            return Err(self.failed("it is no regular file"));
        }
        let mut text = String::new();
        let read = file.take(RECORDS_BYTES_MAX + 1).read_to_string(&mut text);
        if read.map_err(|error| self.failed(error))? as u64 > RECORDS_BYTES_MAX {
            return Err(self.failed(format!("it is longer than {RECORDS_BYTES_MAX} bytes")));
        }
        parse(&text).map_err(|line| self.failed(format!("line {line} is not a host and a fingerprint")))
    }

    fn write(&self, directory: &File, records: &[Record]) -> Result<(), PeerError> {
        let lines = records.iter().map(|Record { host, key, .. }| format!("{host} {key}\n"));
        let text: String = std::iter::once(HEADER.to_owned()).chain(lines).collect();
        let new = format!("{}.new", self.name);
        let written = || -> io::Result<()> {
            // A process that was killed may have left the file.
            match unlinkat(directory, &new, AtFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = File::from(openat(directory, &new, flags, Mode::RUSR | Mode::WUSR)?);
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            renameat(directory, &new, directory, self.name)?;
            fsync(directory)?;
            Ok(())
        };
        written().map_err(|error| self.failed(format!("it cannot be written: {error}")))
    }

    /// Runs an operation on the records of a host while no other process can change them.
    fn with_lock<T>(
        &self,
        host: &str,
        operation: impl FnOnce(&File, Vec<Record>, Vec<Record>) -> Result<T, PeerError>,
    ) -> Result<T, PeerError> {
        let directory = self.open_directory()?;
        flock(&directory, FlockOperation::LockExclusive).map_err(|error| self.failed(io::Error::from(error)))?;
        let (of_host, others) = self.read(&directory)?.into_iter().partition(|it| it.host == host);
        operation(&directory, of_host, others)
    }

    /// Compares the key that a host has shown with its records. The key of a new host is recorded.
    fn check(&self, host: &str, key: Fingerprint) -> Result<(), PeerError> {
        self.with_lock(host, |directory, of_host, others| match of_host.first() {
            _ if of_host.iter().any(|record| record.key == key) => Ok(()),
            Some(known) => Err(PeerError::KeyChanged {
                host: host.to_owned(),
                shown: key,
                known: known.key,
                path: self.path(),
                line: known.line,
            }),
            None => {
                self.add(directory, others, host, key)?;
                tracing::info!(
                    "{host} has connected for the first time: the public key of its certificate has the fingerprint {key}, \
                     which is recorded in {}; any other key is refused from now on",
                    self.path().display()
                );
                Ok(())
            }
        })
    }

    /// Replaces the recorded keys of a host by the key that it has shown.
    fn replace(&self, host: &str, key: Fingerprint) -> Result<(), PeerError> {
        self.with_lock(host, |directory, of_host, others| {
            if of_host.iter().any(|record| record.key == key) {
                return Ok(());
            }
            self.add(directory, others, host, key)?;
            tracing::info!(
                "the public key {key} of {host}, which --peer accepts, is recorded in {}{}",
                self.path().display(),
                match of_host.is_empty() {
                    true => "",
                    false => ", replacing another one",
                }
            );
            Ok(())
        })
    }

    fn add(&self, directory: &File, mut records: Vec<Record>, host: &str, key: Fingerprint) -> Result<(), PeerError> {
        records.push(Record { host: host.to_owned(), key, line: 0 });
        self.write(directory, &records)
    }
}

/// Parses the records of a file; on failure returns the number of the first invalid line.
fn parse(text: &str) -> Result<Vec<Record>, usize> {
    let mut records = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match words[..] {
            [host, key] => records.push(Record {
                host: host.to_owned(),
                key: Fingerprint::parse(key).ok_or(index + 1)?,
                line: index + 1,
            }),
            _ => return Err(index + 1),
        }
    }
    Ok(records)
}

/// Set of accepted peers, among those that the authority has signed.
#[derive(Clone, Debug, Default)]
pub struct Peers {
    /// Peers named by the user; if there are any, no others are accepted.
    pub allowed: Vec<AllowedPeer>,
    /// Otherwise, records of known hosts; new hosts are added. Without records, all are accepted.
    pub records: Option<PeerRecords>,
}

impl Peers {
    /// Checks the certificate that `host` has shown, and records its key where records apply.
    pub(super) fn check(&self, host: &str, peer_certificates: Option<&[CertificateDer<'_>]>) -> Result<(), PeerError> {
        if self.allowed.is_empty() && self.records.is_none() {
            return Ok(());
        }
        let unreadable = |error: &dyn std::fmt::Display| PeerError::Unreadable(error.to_string());
        let leaf = peer_certificates.and_then(|chain| chain.first());
        let leaf = leaf.ok_or_else(|| unreadable(&"there is none"))?;
        let parsed = ParsedCertificate::try_from(leaf).map_err(|error| unreadable(&error))?;
        let certificate = Fingerprint::of(leaf);
        let key = Fingerprint::of(&parsed.subject_public_key_info());
        if self.allowed.is_empty() {
            return self.records.as_ref().map_or(Ok(()), |records| records.check(host, key));
        }
        let is_fingerprint =
            |peer: &AllowedPeer| matches!(peer, AllowedPeer::Fingerprint(given) if [certificate, key].contains(given));
        if self.allowed.iter().any(is_fingerprint) {
            // The peer is accepted even if it cannot be recorded.
            if let Some(Err(error)) = self.records.as_ref().map(|records| records.replace(host, key)) {
                tracing::warn!("{host} could not be recorded: {error}");
            }
            return Ok(());
        }
        let is_name =
            |peer: &AllowedPeer| matches!(peer, AllowedPeer::Name(name) if verify_server_name(&parsed, name).is_ok());
        match self.allowed.iter().any(is_name) {
            true => Ok(()),
            false => Err(PeerError::NotAllowed { certificate, key }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn key(byte: u8) -> Fingerprint {
        Fingerprint([byte; 32])
    }

    /// Fingerprints are parsed as openssl prints them, names and addresses as certificates contain them.
    #[test]
    fn peer_is_fingerprint_or_name() {
        let plain = "0123456789abcdef".repeat(4);
        let with_colons: Vec<String> =
            plain.to_uppercase().as_bytes().chunks(2).map(|pair| String::from_utf8_lossy(pair).into_owned()).collect();
        let with_colons = with_colons.join(":");
        let expected = Fingerprint::parse(&plain).expect("64 digits");
        assert_eq!(expected.to_string(), plain);
        for text in [&plain, &with_colons, &format!("sha256 Fingerprint={with_colons}")] {
            assert_eq!(text.parse(), Ok(AllowedPeer::Fingerprint(expected)), "{text}");
        }
        for name in ["host2.example", "HOST", "192.0.2.7", "2001:db8::1", "::1"] {
            assert!(matches!(name.parse(), Ok(AllowedPeer::Name(_))), "{name}");
        }
        for invalid in ["", "00", "ab:cd", &plain[1..], &format!("{plain}0"), "a b", "-", "sha256 Fingerprint="] {
            assert!(invalid.parse::<AllowedPeer>().is_err(), "{invalid}");
        }
    }

    /// A host is recorded once, recognised by every process, and refused with another key until the user gives that
    /// key.
    #[test]
    fn host_is_pinned_to_first_key() {
        let directory = tempfile::tempdir().expect("a folder");
        let records = PeerRecords::of_senders(directory.path()).expect("it is ours");
        records.check("a", key(1)).expect("it is new");
        records.check("b", key(2)).expect("it is new");
        let again = PeerRecords::of_senders(directory.path()).expect("it is ours");
        again.check("a", key(1)).expect("it is known");
        let refused = again.check("b", key(1)).expect_err("it is another").to_string();
        let location = format!("{}:3 has {} for it", records.path().display(), key(2));
        assert!(refused.contains(&location) && refused.contains(&format!("--peer {}", key(1))), "{refused}");
        again.replace("b", key(1)).expect("it is given");
        again.check("b", key(1)).expect("it is known");
        again.check("b", key(2)).expect_err("it was replaced");
        // Receivers have separate records.
        let receivers = PeerRecords::of_receivers(directory.path()).expect("it is ours");
        receivers.check("a", key(9)).expect("it is new");
        let mode = fs::metadata(records.path()).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    /// Several lines of a host are alternatives.
    #[test]
    fn host_may_have_several_keys() {
        let directory = tempfile::tempdir().expect("a folder");
        let text = format!("# ours\n\na {}\na {}\n", key(1), key(2));
        fs::write(directory.path().join("senders"), text).expect("a file");
        let records = PeerRecords::of_senders(directory.path()).expect("it is ours");
        records.check("a", key(1)).expect("it is known");
        records.check("a", key(2)).expect("it is known");
        records.check("a", key(3)).expect_err("it is another");
    }

    /// Records that cannot be trusted or read refuse every peer, and are not changed.
    #[test]
    fn damaged_or_foreign_records_refuse() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path().join("senders");
        for text in ["a", "a b", "a b c", &format!("x {}\na {}0\n", key(1), key(2))] {
            fs::write(&path, text).expect("a file");
            PeerRecords::of_senders(directory.path()).expect_err(text);
            assert_eq!(fs::read_to_string(&path).expect("is there"), text);
        }
        fs::remove_file(&path).expect("was there");
        let records = PeerRecords::of_senders(directory.path()).expect("it is ours");
        let elsewhere = directory.path().join("elsewhere");
        symlink(&elsewhere, &path).expect("a link");
        records.check("a", key(1)).expect_err("it is a link");
        fs::remove_file(&path).expect("was there");
        // A link in the place of the new file is not followed either.
        symlink(&elsewhere, directory.path().join("senders.new")).expect("a link");
        records.check("a", key(1)).expect("it is new");
        assert!(!elsewhere.exists());
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).expect("ours");
        records.check("a", key(1)).expect_err("others can write there");
        let linked = directory.path().join("linked");
        symlink(directory.path(), &linked).expect("a link");
        PeerRecords::of_senders(&linked).expect_err("it is a link");
    }
}

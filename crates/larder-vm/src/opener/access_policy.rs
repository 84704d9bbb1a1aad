//! Access policy of an opener: the files that the VM's file names, each for its purpose.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use larder_block::event_loop::SocketAddress;
use larder_block::nbd::NbdUri;
use larder_block::opener::Access;
use larder_block::tls::HOST_AUTHORITIES;

use crate::image::{ChainPolicy, ImageAddress};
use crate::listen::Access as SocketAccess;
use crate::read_group::read_group;
use crate::vm::config::VmConfig;

/// Permitted operations on one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FileUse {
    /// The file may be written.
    write: bool,
    /// The file may be created if missing, claimed if it is a device, and removed if the operation that created it
    /// fails.
    create: bool,
}

/// Everything that a VM's file names.
#[derive(Debug, Default)]
pub(super) struct AccessPolicy {
    files: BTreeMap<PathBuf, FileUse>,
    /// The disks' images, for checks by disk identity.
    pub(super) images: Vec<ImageAddress>,
    /// Sockets of NBD servers.
    nbd_sockets: Vec<PathBuf>,
    /// Directories of certificates.
    certificates: Vec<PathBuf>,
    /// Sockets on which the server listens, with their permissions.
    sockets: Vec<(PathBuf, SocketAccess)>,
    pub(super) control: PathBuf,
    pub(super) name: String,
    /// UUID of the VM's libvirt domain.
    pub(super) uuid: Option<String>,
}

fn denied(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{}: {why}", path.display()))
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

impl AccessPolicy {
    pub(super) fn from_config(config: &VmConfig) -> Self {
        let mut allowed = Self {
            control: config.control.clone(),
            name: config.name.clone(),
            uuid: config.uuid.clone(),
            images: config.images().into_iter().cloned().collect(),
            ..Self::default()
        };
        let readers = config.control_access.with_readers(read_group());
        allowed.sockets.push((absolute(&config.control), readers));
        for disk in &config.disks {
            let spec = &disk.spec;
            let write = !spec.read_only;
            allowed.add(&spec.image, FileUse { write, create: false });
            if let ChainPolicy::Pinned { chain, .. } = &spec.chain {
                if let Some(file) = &chain.data_file {
                    allowed.add(file, FileUse { write, create: false });
                }
                for image in &chain.backing {
                    allowed.add(&image.image, FileUse::default());
                    if let Some(file) = &image.data_file {
                        allowed.add(file, FileUse::default());
                    }
                }
            }
            if let Some(cache) = &spec.disk_cache.file {
                allowed.add(cache, FileUse { write: true, create: true });
            }
            allowed.sockets.extend(disk.socket.iter().map(|path| (absolute(path), disk.access)));
            if let Some(at) = &disk.nbd {
                if let SocketAddress::Unix(path) = &at.uri.address {
                    allowed.sockets.push((absolute(path), disk.access));
                }
                allowed.add_certificates(&at.uri);
            }
        }
        allowed
    }

    fn add(&mut self, address: &ImageAddress, file_use: FileUse) {
        match address {
            ImageAddress::Path(path) => {
                let all = self.files.entry(absolute(path)).or_default();
                all.write |= file_use.write;
                all.create |= file_use.create;
            }
            ImageAddress::Nbd(uri) => {
                if let SocketAddress::Unix(path) = &uri.address {
                    self.nbd_sockets.push(absolute(path));
                }
                self.add_certificates(uri);
            }
        }
    }

    fn add_certificates(&mut self, uri: &NbdUri) {
        let Some(tls) = &uri.tls else { return };
        match &tls.certificates {
            Some(directory) => self.certificates.push(absolute(directory)),
            // The certificates that the host trusts are used.
            None => {
                let lists = HOST_AUTHORITIES.map(|path| (PathBuf::from(path), FileUse::default()));
                self.files.extend(lists);
            }
        }
    }

    fn permitted_use(&self, path: &Path) -> io::Result<FileUse> {
        let path = absolute(path);
        if self.is_certificate(&path) {
            return Ok(FileUse::default());
        }
        let found = self.files.get(&path).copied();
        found.ok_or_else(|| {
            denied(
                &path,
                "the VM's file does not name it: add there what the disk needs, and start or reload the VM's server",
            )
        })
    }

    fn is_certificate(&self, path: &Path) -> bool {
        let is_pem = path.extension().is_some_and(|extension| extension == "pem");
        is_pem && path.parent().is_some_and(|parent| self.certificates.iter().any(|directory| directory == parent))
    }

    /// Checks that a file may be opened.
    ///
    /// # Errors
    /// The VM's file does not name the file, or not for this purpose.
    pub(super) fn check_open(&self, path: &Path, access: Access) -> io::Result<()> {
        let file_use = self.permitted_use(path)?;
        match access {
            Access::Inspect | Access::Read => Ok(()),
            Access::Write if file_use.write => Ok(()),
            Access::Claim if file_use.create => Ok(()),
            Access::Write => Err(denied(path, "the VM's file allows only reading it")),
            Access::Claim => Err(denied(path, "the VM's file does not name it as a cache")),
        }
    }

    /// Checks that a file may be created.
    ///
    /// # Errors
    /// The file is not a cache in the VM's file.
    pub(super) fn check_create(&self, path: &Path) -> io::Result<()> {
        match self.permitted_use(path)?.create {
            true => Ok(()),
            false => Err(denied(path, "the VM's file does not name it as a cache")),
        }
    }

    /// Checks that a socket may be connected to.
    ///
    /// # Errors
    /// The path is not the socket of an NBD server in the VM's file.
    pub(super) fn check_connect(&self, path: &Path) -> io::Result<()> {
        match self.nbd_sockets.contains(&absolute(path)) {
            true => Ok(()),
            false => Err(denied(path, "the VM's file names no NBD server there")),
        }
    }

    /// Returns the permissions of a socket on which the server listens.
    ///
    /// # Errors
    /// The path is not a socket in the VM's file.
    pub(super) fn socket_access(&self, path: &Path) -> io::Result<SocketAccess> {
        let found = self.sockets.iter().find(|(socket, _)| *socket == absolute(path));
        let (_, access) = found.ok_or_else(|| denied(path, "the VM's file names no socket there"))?;
        Ok(*access)
    }

    /// Returns whether an image belongs to the VM.
    pub(super) fn has_image(&self, image: &ImageAddress) -> bool {
        self.images.contains(image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
[[disk]]
image = "/i/top.qcow2"
format = "qcow2"
backing = [{ image = "/i/base.qcow2", format = "qcow2" }]
cache = "/ssd/cache"
cache-size = "1G"
"#;

    #[test]
    fn files_open_only_for_their_purpose() {
        let config = VmConfig::parse(Path::new("/etc/larder/vms/web.toml"), TEXT).expect("is right");
        let allowed = AccessPolicy::from_config(&config);
        let opens = |path: &str, access| allowed.check_open(Path::new(path), access).is_ok();
        assert!(opens("/i/top.qcow2", Access::Write) && !opens("/i/top.qcow2", Access::Claim));
        assert!(opens("/i/base.qcow2", Access::Read) && !opens("/i/base.qcow2", Access::Write));
        assert!(opens("/ssd/cache", Access::Claim) && allowed.check_create(Path::new("/ssd/cache")).is_ok());
        assert!(allowed.check_create(Path::new("/i/base.qcow2")).is_err());
        for other in ["/etc/shadow", "/i", "/i/../etc/shadow", "/i/top.qcow2/..", "/ssd/cache.pem"] {
            assert!(!opens(other, Access::Inspect), "{other}");
        }
        assert!(allowed.socket_access(&config.control).is_ok());
        assert!(allowed.socket_access(Path::new("/run/larder/other.sock")).is_err());
        assert!(allowed.check_connect(&config.control).is_err());
    }
}

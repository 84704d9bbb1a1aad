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
struct Use {
    /// The file may be written.
    write: bool,
    /// The file may be created if missing, claimed if it is a device, and removed if the operation that created it
    /// fails.
    make: bool,
}

/// Everything that a VM's file names.
#[derive(Debug, Default)]
pub(super) struct Allowed {
    files: BTreeMap<PathBuf, Use>,
    /// The disks' images, for checks by disk identity.
    pub(super) images: Vec<ImageAddress>,
    /// Sockets of NBD servers.
    connected: Vec<PathBuf>,
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

impl Allowed {
    pub(super) fn of(config: &VmConfig) -> Self {
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
            let wish = &disk.wish;
            let write = !wish.read_only;
            allowed.add(&wish.image, Use { write, make: false });
            if let ChainPolicy::Pinned { chain, .. } = &wish.chain {
                if let Some(file) = &chain.data_file {
                    allowed.add(file, Use { write, make: false });
                }
                for image in &chain.backing {
                    allowed.add(&image.image, Use::default());
                    if let Some(file) = &image.data_file {
                        allowed.add(file, Use::default());
                    }
                }
            }
            if let Some(cache) = &wish.disk_cache.file {
                allowed.add(
                    cache,
                    Use {
                        write: true,
                        make: true,
                    },
                );
            }
            allowed
                .sockets
                .extend(disk.socket.iter().map(|path| (absolute(path), disk.access)));
            if let Some(at) = &disk.nbd {
                if let SocketAddress::Unix(path) = &at.uri.address {
                    allowed.sockets.push((absolute(path), disk.access));
                }
                allowed.add_certificates(&at.uri);
            }
        }
        allowed
    }

    fn add(&mut self, address: &ImageAddress, how: Use) {
        match address {
            ImageAddress::Path(path) => {
                let all = self.files.entry(absolute(path)).or_default();
                all.write |= how.write;
                all.make |= how.make;
            }
            ImageAddress::Nbd(uri) => {
                if let SocketAddress::Unix(path) = &uri.address {
                    self.connected.push(absolute(path));
                }
                self.add_certificates(uri);
            }
        }
    }

    fn add_certificates(&mut self, uri: &NbdUri) {
        let Some(tls) = &uri.tls else { return };
        match &tls.certificates {
            Some(folder) => self.certificates.push(absolute(folder)),
            // The certificates that the host trusts are used.
            None => {
                let lists = HOST_AUTHORITIES.map(|path| (PathBuf::from(path), Use::default()));
                self.files.extend(lists);
            }
        }
    }

    fn use_of(&self, path: &Path) -> io::Result<Use> {
        let path = absolute(path);
        if self.is_certificate(&path) {
            return Ok(Use::default());
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
        is_pem
            && path
                .parent()
                .is_some_and(|folder| self.certificates.iter().any(|it| it == folder))
    }

    /// Checks that a file may be opened.
    ///
    /// # Errors
    /// The VM's file does not name the file, or not for this purpose.
    pub(super) fn open(&self, path: &Path, access: Access) -> io::Result<()> {
        let how = self.use_of(path)?;
        match access {
            Access::Inspect | Access::Read => Ok(()),
            Access::Write if how.write => Ok(()),
            Access::Claim if how.make => Ok(()),
            Access::Write => Err(denied(path, "the VM's file allows only reading it")),
            Access::Claim => Err(denied(path, "the VM's file does not name it as a cache")),
        }
    }

    /// Checks that a file may be created.
    ///
    /// # Errors
    /// The file is not a cache in the VM's file.
    pub(super) fn make(&self, path: &Path) -> io::Result<()> {
        match self.use_of(path)?.make {
            true => Ok(()),
            false => Err(denied(path, "the VM's file does not name it as a cache")),
        }
    }

    /// Checks that a socket may be connected to.
    ///
    /// # Errors
    /// The path is not the socket of an NBD server in the VM's file.
    pub(super) fn connect(&self, path: &Path) -> io::Result<()> {
        match self.connected.contains(&absolute(path)) {
            true => Ok(()),
            false => Err(denied(path, "the VM's file names no NBD server there")),
        }
    }

    /// Returns the permissions of a socket on which the server listens.
    ///
    /// # Errors
    /// The path is not a socket in the VM's file.
    pub(super) fn listen(&self, path: &Path) -> io::Result<SocketAccess> {
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
        let allowed = Allowed::of(&config);
        let opens = |path: &str, access| allowed.open(Path::new(path), access).is_ok();
        assert!(opens("/i/top.qcow2", Access::Write) && !opens("/i/top.qcow2", Access::Claim));
        assert!(opens("/i/base.qcow2", Access::Read) && !opens("/i/base.qcow2", Access::Write));
        assert!(opens("/ssd/cache", Access::Claim) && allowed.make(Path::new("/ssd/cache")).is_ok());
        assert!(allowed.make(Path::new("/i/base.qcow2")).is_err());
        for other in [
            "/etc/shadow",
            "/i",
            "/i/../etc/shadow",
            "/i/top.qcow2/..",
            "/ssd/cache.pem",
        ] {
            assert!(!opens(other, Access::Inspect), "{other}");
        }
        assert!(allowed.listen(&config.control).is_ok());
        assert!(allowed.listen(Path::new("/run/larder/other.sock")).is_err());
        assert!(allowed.connect(&config.control).is_err());
    }
}

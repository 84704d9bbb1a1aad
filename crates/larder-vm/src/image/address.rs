//! Addresses of images: a path or an NBD URI, and QEMU's other notations for either.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use larder_block::nbd::{NbdUri, NbdUriError};
use larder_block::printable;

/// Address of a disk image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageAddress {
    /// A file or a block device.
    Path(PathBuf),
    /// An export of an NBD server.
    Nbd(NbdUri),
}

/// Reason why a text is not an image address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ImageAddressError {
    #[error(transparent)]
    Nbd(#[from] NbdUriError),
    #[error(
        "'{}' is QEMU's name for {what}, which Larder does not open: {instead}, or serve it over NBD (qemu-nbd, nbdkit) and name the export, as in nbd+unix:///?socket=/run/disk.nbd; for a path that begins like that, put ./ before it",
        printable(name)
    )]
    UnsupportedDriver { name: String, what: &'static str, instead: &'static str },
    #[error(
        "'{}': Larder opens paths and nbd://, nbds://, nbd+unix:// and nbds+unix:// URIs; put ./ before a path with '://' in it",
        printable(.0)
    )]
    UnknownScheme(String),
    #[error("the image's name is empty")]
    Empty,
    #[error(
        "'{}' names its driver, so QEMU resolves it relative to the working directory of a process, and a VM's file cannot allow it; use an absolute path (for a backing file: qemu-img rebase -u -F FORMAT -b /PATH IMAGE)",
        printable(.0)
    )]
    RelativeToWorkingDirectory(String),
}

/// Prefixes with which QEMU names its drivers for paths.
const PATH_DRIVERS: [&str; 3] = ["file:", "host_device:", "host_cdrom:"];

/// Prefixes of QEMU's names for images that Larder does not open: prefix, description, and what to do instead. `://`
/// may follow or not.
#[rustfmt::skip]
const UNSUPPORTED_DRIVERS: [(&str, &str, &str); 21] = {
    const MAP_RBD: &str = "map it with `rbd map` and name its block device";
    const LOG_IN: &str = "log in with iscsiadm and name its block device";
    const MOUNT: &str = "mount its file system and name the file";
    const CURL: &str = "download it and name the file";
    const PLAIN: &str = "give the image's plain name";
    [
        ("json:", "an image described in JSON", "give its plain name (`qemu-img rebase -u` gives a backing file one)"),
        ("rbd:", "an image in a Ceph cluster", MAP_RBD),
        ("ssh:", "a file on another host", MOUNT),
        ("http:", "a file on a web server", CURL),
        ("https:", "a file on a web server", CURL),
        ("ftp:", "a file on an FTP server", CURL),
        ("ftps:", "a file on an FTP server", CURL),
        ("iscsi:", "a disk of an iSCSI target", LOG_IN),
        ("iser:", "a disk of an iSCSI target", LOG_IN),
        ("gluster:", "a file on a Gluster volume", MOUNT),
        ("gluster+tcp:", "a file on a Gluster volume", MOUNT),
        ("gluster+unix:", "a file on a Gluster volume", MOUNT),
        ("gluster+rdma:", "a file on a Gluster volume", MOUNT),
        ("nfs:", "a file on an NFS server", MOUNT),
        ("nvme:", "an NVMe device that QEMU drives itself", "name its block device, as in /dev/nvme0n1"),
        ("fat:", "a directory presented as a FAT file system", "make an image of the directory"),
        ("vxhs:", "a disk of a Veritas HyperScale server", PLAIN),
        ("sheepdog:", "a disk of a Sheepdog cluster", PLAIN),
        ("blkdebug:", "an image behind a test driver", PLAIN),
        ("blkverify:", "an image behind a test driver", PLAIN),
        ("null-co:", "a disk without content", "make an empty image"),
    ]
};

impl FromStr for ImageAddress {
    type Err = ImageAddressError;

    fn from_str(text: &str) -> Result<Self, ImageAddressError> {
        if text.is_empty() {
            return Err(ImageAddressError::Empty);
        }
        let has_prefix = |prefix: &str| text.get(..prefix.len()).is_some_and(|head| head.eq_ignore_ascii_case(prefix));
        if ["nbd://", "nbds://", "nbd+unix://", "nbds+unix://", "nbd:"].into_iter().any(has_prefix) {
            return Ok(Self::Nbd(text.parse()?));
        }
        if let Some(path) = PATH_DRIVERS.iter().find_map(|driver| text.strip_prefix(driver)) {
            return match path {
                "" => Err(ImageAddressError::Empty),
                path => Ok(Self::Path(unambiguous_path(path))),
            };
        }
        if let Some((_, what, instead)) = UNSUPPORTED_DRIVERS.into_iter().find(|(driver, ..)| has_prefix(driver)) {
            let name = text.to_owned();
            return Err(ImageAddressError::UnsupportedDriver { name, what, instead });
        }
        let scheme = text.split_once("://").map(|(scheme, _)| scheme);
        if scheme
            .is_some_and(|scheme| !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || c == '+'))
        {
            return Err(ImageAddressError::UnknownScheme(text.to_owned()));
        }
        Ok(Self::Path(PathBuf::from(text)))
    }
}

/// Returns a path that parses as a path again, even if it begins like a driver's name.
fn unambiguous_path(path: &str) -> PathBuf {
    match driver_prefix(path) {
        Some(_) => Path::new(".").join(path),
        None => path.into(),
    }
}

/// Returns the driver that QEMU would read in a file's name: the part before its first colon, if it has no slash.
pub(crate) fn driver_prefix(name: &str) -> Option<&str> {
    name.split_once(':').map(|(driver, _)| driver).filter(|driver| !driver.contains('/'))
}

impl ImageAddress {
    /// Parses a command-line argument; a path need not be UTF-8.
    ///
    /// # Errors
    /// See [`ImageAddressError`].
    pub fn from_argument(argument: &OsStr) -> Result<Self, ImageAddressError> {
        match argument.to_str() {
            Some(text) => text.parse(),
            None => Ok(Self::Path(argument.into())),
        }
    }

    /// Returns the same address with an absolute path.
    #[must_use]
    pub fn absolute(&self) -> Self {
        match self {
            Self::Path(path) => Self::Path(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
            address @ Self::Nbd(_) => address.clone(),
        }
    }

    /// Returns the path if it is not UTF-8.
    pub fn path_not_utf8(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path.as_path()).filter(|path| path.to_str().is_none()),
            Self::Nbd(_) => None,
        }
    }

    /// Parses the name of another file that `image` contains. A relative path is relative to the image; as in QEMU,
    /// one that names its driver (`file:base.raw`) is relative to the working directory of the process.
    ///
    /// # Errors
    /// See [`ImageAddressError`].
    pub fn relative_to(image: &Self, name: &str) -> Result<Self, ImageAddressError> {
        let address: Self = name.parse()?;
        match (&address, image) {
            (Self::Path(path), Self::Path(image)) if !PATH_DRIVERS.iter().any(|driver| name.starts_with(driver)) => {
                let directory = image.parent().unwrap_or(Path::new(""));
                Ok(Self::Path(directory.join(path)))
            }
            _ => Ok(address),
        }
    }
}

/// Checks that the name of another file in an image means the same file in every working directory, as a VM's file
/// requires: its server, and the commands that check it, have different ones.
pub(super) fn check_independent_of_cwd(name: &str) -> Result<(), ImageAddressError> {
    let path = PATH_DRIVERS.iter().find_map(|driver| name.strip_prefix(driver));
    match path {
        Some(path) if Path::new(path).is_relative() => {
            Err(ImageAddressError::RelativeToWorkingDirectory(name.to_owned()))
        }
        _ => Ok(()),
    }
}

impl fmt::Display for ImageAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Nbd(uri) => uri.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> ImageAddress {
        ImageAddress::Path(text.into())
    }

    #[test]
    fn paths_and_uris_are_distinguished() {
        assert_eq!("/srv/a.raw".parse(), Ok(path("/srv/a.raw")));
        assert_eq!("a:b".parse(), Ok(path("a:b")));
        assert_eq!("./nbd://x".parse(), Ok(path("./nbd://x")));
        assert!(matches!("nbd://host/x".parse(), Ok(ImageAddress::Nbd(_))));
        assert!(matches!("NBD+unix:///?socket=/s".parse(), Ok(ImageAddress::Nbd(_))));
        assert!(matches!("nbd:host:10809".parse(), Ok(ImageAddress::Nbd(_))));
        assert!(matches!("other://x/y".parse::<ImageAddress>(), Err(ImageAddressError::UnknownScheme(_))));
        assert_eq!("".parse::<ImageAddress>(), Err(ImageAddressError::Empty));
    }

    /// A path parsed from a name with a driver prints as text that parses as the same path.
    #[test]
    fn driver_prefix_of_path_is_stripped() {
        for (name, expected) in [
            ("file:/srv/a.raw", "/srv/a.raw"),
            ("file:///srv/a.raw", "///srv/a.raw"),
            ("file:a.raw", "a.raw"),
            ("file:nbd:x", "./nbd:x"),
            ("file:odd:name/x.raw", "./odd:name/x.raw"),
            ("file:rbd:x", "./rbd:x"),
            ("host_device:/dev/vg/web", "/dev/vg/web"),
        ] {
            assert_eq!(name.parse(), Ok(path(expected)));
            assert_eq!(expected.parse(), Ok(path(expected)));
        }
        assert_eq!("file:".parse::<ImageAddress>(), Err(ImageAddressError::Empty));
    }

    /// A name of a QEMU driver that Larder lacks is refused with a description and an alternative.
    #[test]
    fn other_drivers_are_refused_with_advice() {
        for (name, message_part) in [
            ("rbd:pool/web", "an image in a Ceph cluster, which Larder does not open: map it with `rbd map`"),
            ("ssh://host/a", "a file on another host"),
            ("HTTPS://host/a.raw", "a file on a web server"),
            ("iscsi://host/iqn/0", "log in with iscsiadm"),
            ("gluster+tcp://host/v/a", "a Gluster volume"),
            ("json:{\"driver\":\"raw\"}", "described in JSON"),
        ] {
            let error = name.parse::<ImageAddress>().expect_err(name).to_string();
            assert!(error.starts_with(&format!("'{name}' is QEMU's name for ")), "{error}");
            assert!(error.contains(message_part), "{error}");
        }
    }

    #[test]
    fn relative_names_resolve_as_in_qemu() {
        let image = path("/srv/vm/web.qcow2");
        for (name, expected) in [
            ("base.raw", "/srv/vm/base.raw"),
            ("a:b.raw", "/srv/vm/a:b.raw"),
            ("/base.raw", "/base.raw"),
            ("file:base.raw", "base.raw"),
            ("file:/base.raw", "/base.raw"),
        ] {
            assert_eq!(ImageAddress::relative_to(&image, name), Ok(path(expected)));
        }
        assert!(matches!(ImageAddress::relative_to(&image, "nbd:unix:/s:exportname=x"), Ok(ImageAddress::Nbd(_))));
        assert!(ImageAddress::relative_to(&image, "rbd:a/b").is_err());
    }
}

//! The server's side of the opener.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

use larder_block::lock_wait::{LockKind, LockOwner};
use larder_block::opener::{Access, BlkidOutput, DiskCounters, Opener, PathSource, set_opener};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::wire::{Answer, Image, PathBytes, Request, pair, receive, send};
use crate::image::ImageAddress;
use crate::image::journal::Folder;

/// The connection to an opener.
#[derive(Debug)]
pub struct Helper {
    channel: OwnedFd,
    /// The opener runs as root, and serves all services of the host.
    pub(crate) is_of_service: bool,
}

static HELPER: OnceLock<Arc<Helper>> = OnceLock::new();

/// Returns this process's opener, if it has one.
pub(crate) fn helper() -> Option<&'static Helper> {
    HELPER.get().map(|helper| &**helper)
}

/// Starts an opener for the VM that `file` describes, with this process's rights. From now on this process accesses
/// files only through the opener, permanently.
///
/// # Errors
/// The opener cannot be started.
pub fn start(file: &Path) -> io::Result<()> {
    let (ours, theirs) = pair()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("larder").arg("open").arg(std::path::absolute(file)?);
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null());
    // The child ends when the other end of its socket is closed, and is not waited for.
    command.spawn()?;
    have(Helper {
        channel: ours,
        is_of_service: false,
    });
    Ok(())
}

/// Connects to the opener of the host's services on `socket`. That opener opens the files that the file of this
/// process's service names.
///
/// # Errors
/// The socket cannot be connected to.
pub fn connect(socket: &Path) -> io::Result<()> {
    let channel = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&channel, &SocketAddrUnix::new(socket)?)?;
    have(Helper {
        channel,
        is_of_service: true,
    });
    Ok(())
}

fn have(helper: Helper) {
    let helper = Arc::new(helper);
    let is_first = HELPER.set(Arc::clone(&helper)).is_ok();
    assert!(is_first, "a process has one opener");
    set_opener(Box::new(ByHelper(helper)));
}

impl Helper {
    fn ask(&self, request: &Request, file: Option<BorrowedFd<'_>>) -> io::Result<(Answer, Vec<OwnedFd>)> {
        let (ours, theirs) = pair()?;
        let descriptors: Vec<BorrowedFd<'_>> = [theirs.as_fd()].into_iter().chain(file).collect();
        let gone = || io::Error::other("the opener of this server has exited: start the server again");
        send(self.channel.as_fd(), request, &descriptors).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => gone(),
            _ => error,
        })?;
        drop(theirs);
        let (answer, descriptors) = receive::<Answer>(&ours)?.ok_or_else(gone)?;
        Ok((answer.result()?, descriptors))
    }

    fn ask_for_file(&self, request: &Request) -> io::Result<OwnedFd> {
        let (_, descriptors) = self.ask(request, None)?;
        descriptors.into_iter().next().ok_or_else(unexpected)
    }

    fn ask_for_paths(&self, request: &Request) -> io::Result<Vec<PathBuf>> {
        match self.ask(request, None)? {
            (Answer::Paths(paths), _) => Ok(paths.iter().map(PathBytes::path).collect()),
            _ => Err(unexpected()),
        }
    }

    /// Opens the VM's file.
    ///
    /// # Errors
    /// Opening fails.
    pub(crate) fn vm_file(&self) -> io::Result<File> {
        Ok(self.ask_for_file(&Request::VmFile)?.into())
    }

    /// Listens on a unix socket of the VM, with the permissions in the VM's file. The socket's file is removed when
    /// this process has ended.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn listen(&self, path: &Path) -> io::Result<OwnedFd> {
        self.ask_for_file(&Request::Listen(PathBytes::of(path)))
    }

    /// Checks whether the process at the other end of a connection to a disk may use the disk; the inner error is the
    /// reason why not.
    ///
    /// # Errors
    /// The opener has ended.
    pub(crate) fn may_connect(&self, connection: BorrowedFd<'_>) -> io::Result<Result<(), String>> {
        match self.ask(&Request::MayConnect, Some(connection))? {
            (Answer::Done, _) => Ok(Ok(())),
            (Answer::Text(why), _) => Ok(Err(why)),
            _ => Err(unexpected()),
        }
    }

    /// Removes the file of a socket on which this process listened.
    ///
    /// # Errors
    /// The opener has ended.
    pub(crate) fn stop_listening(&self, path: &Path) -> io::Result<()> {
        self.ask(&Request::StopListening(PathBytes::of(path)), None).map(drop)
    }

    /// Removes the registration of the VM's name.
    ///
    /// # Errors
    /// The opener has ended.
    pub(crate) fn forget_name(&self) -> io::Result<()> {
        self.ask(&Request::ForgetName, None).map(drop)
    }

    /// Registers the VM's control socket under the VM's name, until this process has ended.
    ///
    /// # Errors
    /// Registration fails.
    pub(crate) fn note_name(&self) -> io::Result<()> {
        self.ask(&Request::NoteName, None).map(drop)
    }

    /// Returns whether the VM is marked as being on another host.
    ///
    /// # Errors
    /// The file system does not answer that.
    pub(crate) fn is_away(&self) -> io::Result<bool> {
        match self.ask(&Request::IsAway, None)? {
            (Answer::Is(is_away), _) => Ok(is_away),
            _ => Err(unexpected()),
        }
    }

    /// Marks the VM as being on another host, with a reason, or removes the mark.
    ///
    /// # Errors
    /// Writing or removing the marker fails.
    pub(crate) fn set_away(&self, why: Option<&str>) -> io::Result<()> {
        self.ask(&Request::SetAway(why.map(str::to_owned)), None).map(drop)
    }

    /// Returns the directories in which other processes may keep a journal of an image of the VM.
    ///
    /// # Errors
    /// The image does not belong to the VM.
    pub(crate) fn journal_folders(&self, image: &ImageAddress) -> io::Result<Vec<Folder>> {
        match self.ask(&Request::Journals(Image::of(image)), None)? {
            (Answer::Folders(folders), _) => Ok(folders.into_iter().map(Folder::from).collect()),
            _ => Err(unexpected()),
        }
    }

    /// Returns the paths of the state files of caches that other processes have used with a disk of this identity.
    ///
    /// # Errors
    /// The disk does not belong to the VM.
    pub(crate) fn notes_of_caches(&self, disk: &[u8]) -> io::Result<Vec<PathBuf>> {
        self.ask_for_paths(&Request::Notes(disk.to_vec()))
    }

    /// Marks beside one of those state files that the disk is used without the cache.
    ///
    /// # Errors
    /// Writing fails.
    pub(crate) fn mark_used(&self, note: &Path) -> io::Result<()> {
        self.ask(&Request::MarkUsed(PathBytes::of(note)), None).map(drop)
    }
}

fn unexpected() -> io::Error {
    io::Error::other("the opener of this server has sent an unexpected answer")
}

/// Accesses files through the helper.
struct ByHelper(Arc<Helper>);

impl Opener for ByHelper {
    fn open(&self, path: &Path, access: Access, _by: PathSource) -> io::Result<File> {
        // The opener treats all paths alike: a compromised server could claim any source for one.
        let request = Request::Open {
            path: PathBytes::of(path),
            access,
        };
        Ok(self.0.ask_for_file(&request)?.into())
    }

    fn create_file(&self, path: &Path) -> io::Result<File> {
        Ok(self.0.ask_for_file(&Request::Make(PathBytes::of(path)))?.into())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.ask(&Request::Remove(PathBytes::of(path)), None).map(drop)
    }

    fn connect(&self, path: &Path) -> io::Result<OwnedFd> {
        self.0.ask_for_file(&Request::Connect(PathBytes::of(path)))
    }

    fn canonicalize(&self, path: &Path) -> io::Result<PathBuf> {
        let paths = self.0.ask_for_paths(&Request::Canonical(PathBytes::of(path)))?;
        paths.into_iter().next().ok_or_else(unexpected)
    }

    fn device_names(&self, folder: &Path, path: &Path) -> io::Result<Vec<PathBuf>> {
        let (folder, path) = (PathBytes::of(folder), PathBytes::of(path));
        self.0.ask_for_paths(&Request::NamesOfDevice { folder, path })
    }

    fn disk_sequence(&self, device: u64) -> io::Result<String> {
        match self.0.ask(&Request::DiskSequence(device), None)? {
            (Answer::Text(text), _) => Ok(text),
            _ => Err(unexpected()),
        }
    }

    fn disk_counters(&self, device: u64) -> io::Result<DiskCounters> {
        match self.0.ask(&Request::DiskCounters(device), None)? {
            (Answer::Text(text), _) => text.parse(),
            _ => Err(unexpected()),
        }
    }

    fn blkid(&self, file: &File) -> io::Result<BlkidOutput> {
        match self.0.ask(&Request::Blkid, Some(file.as_fd()))? {
            (
                Answer::Blkid {
                    status,
                    said,
                    complaint,
                },
                _,
            ) => Ok(BlkidOutput {
                status,
                stdout: said,
                stderr: complaint,
            }),
            _ => Err(unexpected()),
        }
    }

    fn lock_owner(&self, file: BorrowedFd<'_>, kind: LockKind) -> LockOwner {
        match self.0.ask(&Request::LockOwner(kind.into()), Some(file)) {
            Ok((Answer::Owner(owner), _)) => owner.into(),
            // The owner counts as one that cannot be inspected.
            _ => LockOwner::Running,
        }
    }

    fn image_lock_owners(&self, file: BorrowedFd<'_>) -> Vec<String> {
        match self.0.ask(&Request::LockHolders, Some(file)) {
            Ok((Answer::Text(text), _)) => text.lines().map(str::to_owned).collect(),
            _ => Vec::new(),
        }
    }
}

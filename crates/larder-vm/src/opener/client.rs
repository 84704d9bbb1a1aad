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

use super::wire::{OpenerAnswer, OpenerRequest, PathBytes, WireImage, pair, receive, send};
use crate::image::ImageAddress;
use crate::image::journal::JournalDirectory;

/// The connection to an opener.
#[derive(Debug)]
pub struct OpenerClient {
    channel: OwnedFd,
    /// The opener runs as root, and serves all services of the host.
    pub(crate) is_host_opener: bool,
}

static OPENER_CLIENT: OnceLock<Arc<OpenerClient>> = OnceLock::new();

/// Returns this process's opener, if it has one.
pub(crate) fn opener_client() -> Option<&'static OpenerClient> {
    OPENER_CLIENT.get().map(|client| &**client)
}

/// Starts an opener for the VM that `file` describes, with this process's rights. From now on this process accesses
/// files only through the opener, permanently.
///
/// # Errors
/// The opener cannot be started.
pub fn start(file: &Path) -> io::Result<()> {
    let (local, peer) = pair()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("larder").arg("open").arg(std::path::absolute(file)?);
    command.stdin(Stdio::from(peer)).stdout(Stdio::null());
    // The child ends when the other end of its socket is closed, and is not waited for.
    command.spawn()?;
    install(OpenerClient { channel: local, is_host_opener: false });
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
    install(OpenerClient { channel, is_host_opener: true });
    Ok(())
}

fn install(client: OpenerClient) {
    let client = Arc::new(client);
    let is_first = OPENER_CLIENT.set(Arc::clone(&client)).is_ok();
    assert!(is_first, "a process has one opener");
    set_opener(Box::new(RemoteOpener(client)));
}

impl OpenerClient {
    fn request(
        &self,
        request: &OpenerRequest,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<(OpenerAnswer, Vec<OwnedFd>)> {
        let (local, peer) = pair()?;
        let descriptors: Vec<BorrowedFd<'_>> = [peer.as_fd()].into_iter().chain(file).collect();
        let ended_error = || io::Error::other("the opener of this server has exited: start the server again");
        send(self.channel.as_fd(), request, &descriptors).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => ended_error(),
            _ => error,
        })?;
        drop(peer);
        let (answer, descriptors) = receive::<OpenerAnswer>(&local)?.ok_or_else(ended_error)?;
        Ok((answer.result()?, descriptors))
    }

    fn request_file(&self, request: &OpenerRequest) -> io::Result<OwnedFd> {
        let (_, descriptors) = self.request(request, None)?;
        descriptors.into_iter().next().ok_or_else(unexpected_answer)
    }

    fn request_paths(&self, request: &OpenerRequest) -> io::Result<Vec<PathBuf>> {
        match self.request(request, None)? {
            (OpenerAnswer::Paths(paths), _) => Ok(paths.iter().map(PathBytes::path).collect()),
            _ => Err(unexpected_answer()),
        }
    }

    /// Opens the VM's file.
    ///
    /// # Errors
    /// Opening fails.
    pub(crate) fn vm_file(&self) -> io::Result<File> {
        Ok(self.request_file(&OpenerRequest::VmFile)?.into())
    }

    /// Listens on a unix socket of the VM, with the permissions in the VM's file. The socket's file is removed when
    /// this process has ended.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn listen(&self, path: &Path) -> io::Result<OwnedFd> {
        self.request_file(&OpenerRequest::Listen(PathBytes::from_path(path)))
    }

    /// Checks whether the process at the other end of a connection to a disk may use the disk; the inner error is the
    /// reason why not.
    ///
    /// # Errors
    /// The opener has ended.
    pub(crate) fn may_connect(&self, connection: BorrowedFd<'_>) -> io::Result<Result<(), String>> {
        match self.request(&OpenerRequest::MayConnect, Some(connection))? {
            (OpenerAnswer::Done, _) => Ok(Ok(())),
            (OpenerAnswer::Text(why), _) => Ok(Err(why)),
            _ => Err(unexpected_answer()),
        }
    }

    /// Removes the file of a socket on which this process listened.
    ///
    /// # Errors
    /// The opener has ended.
    pub(crate) fn stop_listening(&self, path: &Path) -> io::Result<()> {
        self.request(&OpenerRequest::StopListening(PathBytes::from_path(path)), None).map(drop)
    }

    /// Removes the registration of the VM's name.
    ///
    /// # Errors
    /// The opener has ended.
    pub(crate) fn unregister_name(&self) -> io::Result<()> {
        self.request(&OpenerRequest::ForgetName, None).map(drop)
    }

    /// Registers the VM's control socket under the VM's name, until this process has ended.
    ///
    /// # Errors
    /// Registration fails.
    pub(crate) fn register_name(&self) -> io::Result<()> {
        self.request(&OpenerRequest::NoteName, None).map(drop)
    }

    /// Returns whether the VM is marked as being on another host.
    ///
    /// # Errors
    /// The file system does not answer that.
    pub(crate) fn is_away(&self) -> io::Result<bool> {
        match self.request(&OpenerRequest::IsAway, None)? {
            (OpenerAnswer::Is(is_away), _) => Ok(is_away),
            _ => Err(unexpected_answer()),
        }
    }

    /// Marks the VM as being on another host, with a reason, or removes the mark.
    ///
    /// # Errors
    /// Writing or removing the marker fails.
    pub(crate) fn set_away(&self, why: Option<&str>) -> io::Result<()> {
        self.request(&OpenerRequest::SetAway(why.map(str::to_owned)), None).map(drop)
    }

    /// Returns the directories in which other processes may keep a journal of an image of the VM.
    ///
    /// # Errors
    /// The image does not belong to the VM.
    pub(crate) fn journal_directories(&self, image: &ImageAddress) -> io::Result<Vec<JournalDirectory>> {
        match self.request(&OpenerRequest::Journals(WireImage::from_address(image)), None)? {
            (OpenerAnswer::Folders(directories), _) => {
                Ok(directories.into_iter().map(JournalDirectory::from).collect())
            }
            _ => Err(unexpected_answer()),
        }
    }

    /// Returns the paths of the state files of caches that other processes have used with a disk of this identity.
    ///
    /// # Errors
    /// The disk does not belong to the VM.
    pub(crate) fn cache_state_files(&self, disk: &[u8]) -> io::Result<Vec<PathBuf>> {
        self.request_paths(&OpenerRequest::Notes(disk.to_vec()))
    }

    /// Marks beside one of those state files that the disk is used without the cache.
    ///
    /// # Errors
    /// Writing fails.
    pub(crate) fn mark_used(&self, state_file: &Path) -> io::Result<()> {
        self.request(&OpenerRequest::MarkUsed(PathBytes::from_path(state_file)), None).map(drop)
    }
}

fn unexpected_answer() -> io::Error {
    io::Error::other("the opener of this server has sent an unexpected answer")
}

/// Accesses files through the helper.
struct RemoteOpener(Arc<OpenerClient>);

impl Opener for RemoteOpener {
    fn open(&self, path: &Path, access: Access, _by: PathSource) -> io::Result<File> {
        // The opener treats all paths alike: a compromised server could claim any source for one.
        let request = OpenerRequest::Open { path: PathBytes::from_path(path), access };
        Ok(self.0.request_file(&request)?.into())
    }

    fn create_file(&self, path: &Path) -> io::Result<File> {
        Ok(self.0.request_file(&OpenerRequest::Make(PathBytes::from_path(path)))?.into())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.request(&OpenerRequest::Remove(PathBytes::from_path(path)), None).map(drop)
    }

    fn connect(&self, path: &Path) -> io::Result<OwnedFd> {
        self.0.request_file(&OpenerRequest::Connect(PathBytes::from_path(path)))
    }

    fn canonicalize(&self, path: &Path) -> io::Result<PathBuf> {
        let paths = self.0.request_paths(&OpenerRequest::Canonical(PathBytes::from_path(path)))?;
        paths.into_iter().next().ok_or_else(unexpected_answer)
    }

    fn device_names(&self, directory: &Path, path: &Path) -> io::Result<Vec<PathBuf>> {
        let (directory, path) = (PathBytes::from_path(directory), PathBytes::from_path(path));
        self.0.request_paths(&OpenerRequest::NamesOfDevice { folder: directory, path })
    }

    fn disk_sequence(&self, device: u64) -> io::Result<String> {
        match self.0.request(&OpenerRequest::DiskSequence(device), None)? {
            (OpenerAnswer::Text(text), _) => Ok(text),
            _ => Err(unexpected_answer()),
        }
    }

    fn disk_counters(&self, device: u64) -> io::Result<DiskCounters> {
        match self.0.request(&OpenerRequest::DiskCounters(device), None)? {
            (OpenerAnswer::Text(text), _) => text.parse(),
            _ => Err(unexpected_answer()),
        }
    }

    fn blkid(&self, file: &File) -> io::Result<BlkidOutput> {
        match self.0.request(&OpenerRequest::Blkid, Some(file.as_fd()))? {
            (OpenerAnswer::Blkid { status, said, complaint }, _) => {
                Ok(BlkidOutput { status, stdout: said, stderr: complaint })
            }
            _ => Err(unexpected_answer()),
        }
    }

    fn lock_owner(&self, file: BorrowedFd<'_>, kind: LockKind) -> LockOwner {
        match self.0.request(&OpenerRequest::LockOwner(kind.into()), Some(file)) {
            Ok((OpenerAnswer::Owner(owner), _)) => owner.into(),
            // The owner counts as one that cannot be inspected.
            _ => LockOwner::Running,
        }
    }

    fn image_lock_owners(&self, file: BorrowedFd<'_>) -> Vec<String> {
        match self.0.request(&OpenerRequest::LockHolders, Some(file)) {
            Ok((OpenerAnswer::Text(text), _)) => text.lines().map(str::to_owned).collect(),
            _ => Vec::new(),
        }
    }
}

//! A host that serves a VM's disk with `larder vm`; one machine can have several of them. A host consists of its
//! persistent and volatile state, and the commands that run on it. The image is on storage that all hosts reach.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use larder_vm::control::fetch_disks;
use larder_vm::control::state::DiskState;
use tempfile::TempDir;

use super::super::process::{Process, killed_with_parent};
use super::LIMIT;
use super::larder::{Side, whole_move_command, whole_receive_command};
use super::vm::{Machine, Vm, prefix_command};

/// Number of disk slots that [`WRITE_AND_VERIFY_SCRIPT`] writes to.
pub const PLACES: u64 = 24;

/// A shell function for a guest's script. `write_and_look TICK` writes new data to one disk slot after the other,
/// bypassing the guest's page cache, and flushes it. It also checks that the next slot still has the data from a
/// round ago: stale or lost data is a `MISMATCH` on the console.
pub const WRITE_AND_VERIFY_SCRIPT: &str = r#"
mkdir /was
write_and_look() {
  place=$(($1 % 24))
  next=$((($1 + 1) % 24))
  yes "tick $1" | head -c 65536 >/was/$place
  dd if=/was/$place of=/dev/vda bs=64k seek=$place oflag=direct conv=fsync 2>/dev/null || echo "MISMATCH: cannot write"
  if [ -e /was/$next ]; then
    dd if=/dev/vda of=/is bs=64k skip=$next count=1 iflag=direct 2>/dev/null || echo "MISMATCH: cannot read"
    cmp /is /was/$next || { echo "MISMATCH: $(head -n 1 /is), not $(head -n 1 /was/$next)"; exit 1; }
  fi
}
"#;

/// Name of the disk's socket, in the directory of sockets.
const SOCKET: &str = "vda";

/// A host.
pub struct Host {
    larder: PathBuf,
    /// Directory of sockets and volatile state, cleared by a reboot.
    folder: TempDir,
    /// Directory of persistent state, the VM's file, and caches.
    lasting: TempDir,
    /// Number of boots, if the host has boot IDs of its own.
    starts: Option<u32>,
}

impl Host {
    /// Creates a host that serves `image`, a path or an NBD URI, which is raw or qcow2, with a cache in this mode.
    /// `folder` must be on tmpfs, `lasting` on a file system with direct I/O.
    ///
    /// # Errors
    /// If the VM's file cannot be written.
    pub fn new(
        larder: &Path,
        (image, format): (&str, &str),
        mode: &str,
        volatile: TempDir,
        persistent: TempDir,
    ) -> anyhow::Result<Self> {
        let host = Self { larder: larder.to_owned(), folder: volatile, lasting: persistent, starts: None };
        let text = format!(
            "control = '{}'\n[[disk]]\nimage = '{image}'\nformat = '{format}'\nsocket = '{}'\nserial = 'WEB'\ncache = '{}'\n\
             cache-size = '16MiB'\ncache-mode = '{mode}'\n",
            host.control().display(),
            host.socket().display(),
            host.cache().display()
        );
        fs::write(host.file(), text)?;
        Ok(host)
    }

    /// Adds lines to the disk's section of the VM's file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn with_lines(self, lines: &str) -> io::Result<Self> {
        let text = fs::read_to_string(self.file())?;
        fs::write(self.file(), format!("{text}{lines}\n"))?;
        Ok(self)
    }

    /// Gives the host boot IDs of its own, so that it can reboot. This needs root.
    ///
    /// # Errors
    /// If the boot ID cannot be written.
    pub fn with_boot_ids(mut self) -> anyhow::Result<Self> {
        self.starts = Some(0);
        self.boots()?;
        Ok(self)
    }

    /// Reboots the host: clears its volatile state. No process may be running on it.
    ///
    /// # Errors
    /// If the directory cannot be emptied.
    pub fn boots(&mut self) -> anyhow::Result<()> {
        for entry in fs::read_dir(self.folder.path())? {
            let path = entry?.path();
            match path.is_dir() {
                true => fs::remove_dir_all(&path)?,
                false => fs::remove_file(&path)?,
            }
        }
        let Some(starts) = &mut self.starts else { return Ok(()) };
        *starts += 1;
        // Inode numbers keep the boot IDs of concurrent hosts distinct.
        let host = self.lasting.path().metadata()?.ino() as u32;
        let id = format!("{host:08x}-{:04x}-4000-8000-{starts:012x}\n", *starts as u16);
        Ok(fs::write(self.boot_id(), id)?)
    }

    /// Path of the VM's file.
    fn file(&self) -> PathBuf {
        self.lasting.path().join("web.toml")
    }

    fn boot_id(&self) -> PathBuf {
        self.lasting.path().join("boot-id")
    }

    /// Path of the server's control socket.
    pub fn control(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    /// Path of the disk's socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    /// Path of the disk's cache.
    pub fn cache(&self) -> PathBuf {
        self.lasting.path().join("cache")
    }

    /// Makes a command run on this host.
    pub fn has(&self, command: Command) -> Command {
        let mut command = match self.starts {
            Some(_) => {
                let script = format!(
                    "mount --bind '{}' /proc/sys/kernel/random/boot_id && exec \"$@\"",
                    self.boot_id().display()
                );
                prefix_command(&["unshare", "--mount", "sh", "-c", &script, "sh"], command)
            }
            None => command,
        };
        command.env("RUNTIME_DIRECTORY", self.folder.path()).env("STATE_DIRECTORY", self.lasting.path());
        command
    }

    /// Returns the `larder vm` command for the VM's file.
    pub fn vm(&self, options: &[&str]) -> Command {
        let mut command = killed_with_parent(self.larder.to_str().expect("UTF-8"));
        command.arg("vm").arg(self.file()).args(options);
        self.has(command)
    }

    /// Starts the disk's server, and waits until it serves.
    ///
    /// # Errors
    /// If it does not, with its output.
    pub fn serve(&self, options: &[&str]) -> anyhow::Result<Process> {
        let process = Process::start(self.vm(options))?;
        process.wait_for(" ready ", LIMIT)?;
        Ok(process)
    }

    /// Returns the state of the disk that the server reports.
    ///
    /// # Errors
    /// If the server does not answer.
    pub fn disk(&self) -> anyhow::Result<DiskState> {
        let (_, disks) = fetch_disks(&self.control())?;
        disks.disks.into_iter().next().context("there is no disk")
    }

    /// Returns whether a record says that the VM is elsewhere, so that a server started here does not open the disk.
    ///
    /// # Errors
    /// If the records cannot be listed.
    pub fn has_move_record(&self) -> anyhow::Result<bool> {
        match fs::read_dir(self.lasting.path().join("moves")) {
            Ok(mut records) => Ok(records.next().is_some()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Starts `larder migrate receive` for an incoming QEMU on this host, and waits until it listens.
    ///
    /// # Errors
    /// If it does not, with its output.
    pub fn receiver(&self, vm: &Vm, listen: &str) -> anyhow::Result<Side> {
        let command = whole_receive_command(&self.larder, listen, vm.external_qmp(), &[]);
        Side::listening(self.has(command))
    }

    /// Returns the `larder migrate` command for a QEMU on this host, to a receiver at `to`.
    pub fn mover(&self, source: &Vm, to: &str, arguments: &[&str]) -> Command {
        self.has(whole_move_command(&self.larder, source.external_qmp(), to, arguments))
    }

    /// Starts an incoming QEMU on this host.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub fn incoming(&self, machine: &Machine) -> anyhow::Result<Vm> {
        machine.start_incoming_with_disk(&self.socket())
    }

    /// Boots the guest on this host.
    ///
    /// # Errors
    /// If the guest does not get that far.
    pub fn boot(&self, machine: &Machine) -> anyhow::Result<Vm> {
        machine.boot_with_disk(&self.socket())
    }
}

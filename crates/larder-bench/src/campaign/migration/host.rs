//! A host that serves a VM's disk (`larder vm`), of which there may be several on one machine: what it remembers, and the
//! commands that are run there. The image is on storage that all of them reach.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use larder_vm::control::fetch_disks;
use larder_vm::control::state::DiskState;
use tempfile::TempDir;

use super::super::process::{Process, mortal};
use super::LIMIT;
use super::larder::{Side, move_command, receive_whole_command};
use super::vm::{Machine, Vm, put_before};

/// How many places [`WRITE_AND_LOOK`] writes to.
pub const PLACES: u64 = 24;

/// A function of a guest's script. `write_and_look TICK` writes something new to one place of the disk after the other, past
/// the guest's page cache, and has it flushed; and looks whether what was written to the next place a round ago is still
/// there, so that a stale or lost one is a `MISMATCH` on the console.
pub const WRITE_AND_LOOK: &str = r#"
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

/// The socket of its one disk, in the folder of sockets.
const SOCKET: &str = "vda";

/// A host.
pub struct Host {
    larder: PathBuf,
    /// Sockets, and what is remembered until it restarts.
    folder: TempDir,
    /// What is remembered longer, the VM's file, and caches.
    lasting: TempDir,
    /// How often it was started, if that can be told from the other hosts'.
    starts: Option<u32>,
}

impl Host {
    /// That serves `image`, a path or an NBD URI, which is raw or qcow2, with a cache in this mode. `folder` is on tmpfs,
    /// `lasting` where there is direct I/O.
    ///
    /// # Errors
    /// Its VM's file cannot be written.
    pub fn new(
        larder: &Path,
        (image, format): (&str, &str),
        mode: &str,
        folder: TempDir,
        lasting: TempDir,
    ) -> anyhow::Result<Self> {
        let host = Self {
            larder: larder.to_owned(),
            folder,
            lasting,
            starts: None,
        };
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

    /// The same, of whose disk its VM's file says this besides, in lines.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn with_lines(self, lines: &str) -> io::Result<Self> {
        let text = fs::read_to_string(self.file())?;
        fs::write(self.file(), format!("{text}{lines}\n"))?;
        Ok(self)
    }

    /// The same, with a boot ID of its own, so that it can restart. This needs root.
    ///
    /// # Errors
    /// It has nowhere to keep it.
    pub fn with_boots(mut self) -> anyhow::Result<Self> {
        self.starts = Some(0);
        self.boots()?;
        Ok(self)
    }

    /// All that it remembers until it restarts is gone. Nothing may run there.
    ///
    /// # Errors
    /// The folder cannot be emptied.
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
        // No two hosts' folders have the same number at once.
        let host = self.lasting.path().metadata()?.ino() as u32;
        let id = format!("{host:08x}-{:04x}-4000-8000-{starts:012x}\n", *starts as u16);
        Ok(fs::write(self.boot_id(), id)?)
    }

    /// The VM's file.
    fn file(&self) -> PathBuf {
        self.lasting.path().join("web.toml")
    }

    fn boot_id(&self) -> PathBuf {
        self.lasting.path().join("boot-id")
    }

    /// The server's control socket.
    pub fn control(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    /// Where the disk is served.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    /// The disk's cache.
    pub fn cache(&self) -> PathBuf {
        self.lasting.path().join("cache")
    }

    /// The command runs on this host.
    pub fn has(&self, command: Command) -> Command {
        let mut command = match self.starts {
            Some(_) => {
                let script = format!(
                    "mount --bind '{}' /proc/sys/kernel/random/boot_id && exec \"$@\"",
                    self.boot_id().display()
                );
                put_before(&["unshare", "--mount", "sh", "-c", &script, "sh"], command)
            }
            None => command,
        };
        command
            .env("RUNTIME_DIRECTORY", self.folder.path())
            .env("STATE_DIRECTORY", self.lasting.path());
        command
    }

    /// `larder vm` for its VM's file.
    pub fn vm(&self, options: &[&str]) -> Command {
        let mut command = mortal(self.larder.to_str().expect("UTF-8"));
        command.arg("vm").arg(self.file()).args(options);
        self.has(command)
    }

    /// Starts the disk's server, and waits until it serves.
    ///
    /// # Errors
    /// It does not, with what it said.
    pub fn serve(&self, options: &[&str]) -> anyhow::Result<Process> {
        let process = Process::start(self.vm(options))?;
        process.wait_for(" ready ", LIMIT)?;
        Ok(process)
    }

    /// What its server says of the disk.
    ///
    /// # Errors
    /// It does not answer.
    pub fn disk(&self) -> anyhow::Result<DiskState> {
        let (_, disks) = fetch_disks(&self.control())?;
        disks.disks.into_iter().next().context("there is no disk")
    }

    /// Whether a server that is started here leaves the disk alone, since its VM is elsewhere.
    ///
    /// # Errors
    /// What it remembers cannot be looked at.
    pub fn is_noted_away(&self) -> anyhow::Result<bool> {
        match fs::read_dir(self.lasting.path().join("moves")) {
            Ok(mut notes) => Ok(notes.next().is_some()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// `larder migrate receive` for a QEMU that waits here, once it listens.
    ///
    /// # Errors
    /// It does not, with what it said.
    pub fn receiver(&self, vm: &Vm, listen: &str) -> anyhow::Result<Side> {
        let command = receive_whole_command(&self.larder, listen, vm.qmp_for_others(), &[]);
        Side::listening(self.has(command))
    }

    /// `larder migrate` for a QEMU here, to a receiver at `to`.
    pub fn mover(&self, source: &Vm, to: &str, words: &[&str]) -> Command {
        self.has(move_command(&self.larder, source.qmp_for_others(), to, words))
    }

    /// A QEMU that waits here.
    ///
    /// # Errors
    /// It does not start.
    pub fn incoming(&self, machine: &Machine) -> anyhow::Result<Vm> {
        machine.incoming_with(&self.socket())
    }

    /// Boots the guest here.
    ///
    /// # Errors
    /// It does not get that far.
    pub fn boot(&self, machine: &Machine) -> anyhow::Result<Vm> {
        machine.boot_with(&self.socket())
    }
}

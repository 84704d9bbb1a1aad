//! The plan: a pure function from QEMU's command line to the processes that `larder run` starts.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::arguments::split;
use super::disks::{self, DiskContext};
use super::drive::Reason;
use super::keyval::KeyValues;
use super::machine::Machine;
use super::memory::PlannedMemory;
use super::ram::{self, Ram, RamFile};
use super::rewrite::Rewrite;
use super::shell::command_line;
use super::version::QemuVersion;
use crate::image::{ImageAddress, is_same};
use crate::listen::same_place;
use crate::memory::BudgetError;
use crate::memory::wish::{MemoryWish, WishError};
use crate::wish::DiskWish;

/// A plan of processes and resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// QEMU's program and arguments.
    pub qemu: Vec<OsString>,
    /// Disks to serve before QEMU starts.
    pub disks: Vec<PlannedDisk>,
    /// Management of QEMU's memory once it runs.
    pub memory: Option<PlannedMemory>,
    /// Files to create before QEMU starts.
    pub ram: Vec<RamFile>,
    /// Paths that must be directories: QEMU would write RAM to a file of the user's otherwise.
    pub folders: Vec<PathBuf>,
    /// Changes to the command line, and unexpected omissions; one line each.
    pub changes: Vec<String>,
}

/// Source of a disk's options, which determines how advice is worded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBy {
    /// `-drive if=virtio`.
    Drive,
    /// `-device virtio-blk-...` and its `-drive`.
    Device,
    /// `--disk`.
    Option,
    /// The VM's file.
    File,
}

impl GivenBy {
    /// Returns the name of the source.
    pub(super) fn place(self) -> &'static str {
        match self {
            Self::Drive | Self::Device | Self::Option => "the command line",
            Self::File => "the file",
        }
    }

    /// Returns how a disk is shared in that source's notation.
    pub(super) fn share(self) -> &'static str {
        match self {
            Self::Drive | Self::Device | Self::Option => "share=on (share-rw=on at a -device)",
            Self::File => "share = true",
        }
    }
}

/// A disk, and the socket to which QEMU connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedDisk {
    /// Options of the disk.
    pub disk: DiskWish,
    /// Source of the options.
    pub given_by: GivenBy,
    /// Socket for QEMU.
    pub socket: PathBuf,
}

impl PlannedDisk {
    /// Returns the parts that are checked before the disk is served.
    pub fn to_check(&self) -> (&DiskWish, GivenBy) {
        (&self.disk, self.given_by)
    }

    /// Returns the file that the disk's server creates once it listens.
    pub fn ready_file(&self) -> PathBuf {
        self.socket.with_extension("pid")
    }

    /// Returns the socket of the server, if a keeper is between it and QEMU.
    pub(super) fn server_socket(&self) -> PathBuf {
        self.socket.with_extension("server")
    }

    /// Returns the arguments of a server to which QEMU connects directly.
    pub fn serve_arguments(&self) -> Vec<OsString> {
        self.disk.serve_arguments(&self.socket, &self.ready_file())
    }

    /// Returns the arguments of a server behind a keeper. A restarted server opens the same files as the first one.
    pub fn kept_serve_arguments(&self) -> Vec<OsString> {
        let mut arguments = self.disk.serve_arguments(&self.server_socket(), &self.ready_file());
        arguments.extend(["--pin-chain".into(), self.chain_file().into()]);
        arguments
    }

    /// Returns the file in which the first server records the files that it has opened.
    pub(super) fn chain_file(&self) -> PathBuf {
        self.socket.with_extension("chain")
    }
}

/// Environment of a plan: paths, and QEMU's version.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// Version of the QEMU that will run.
    pub version: QemuVersion,
    /// Directory for the sockets.
    pub sockets: &'a Path,
    /// Path of the RAM's file; further files get a number as a suffix.
    pub ram: &'a Path,
    /// Images that Larder cannot serve, with reasons: their drives stay with QEMU.
    pub left: &'a [(ImageAddress, Reason)],
    /// Options for managing the guest's memory, if it is to be managed.
    pub memory: Option<&'a MemoryWish>,
}

/// Reason why a command line cannot be run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum PlanError {
    #[error("no QEMU command: give it after --, as in larder run -- qemu-system-x86_64 -m 2G ...")]
    NoCommand,
    #[error(
        "-daemonize: larder run stays in the foreground with QEMU to serve its disks; drop the option, and run \
         larder itself as a service or with &"
    )]
    Daemonize,
    #[error(
        "--disk {image}: -snapshot does not apply to it, and the guest's writes would be permanent: add readonly=on, or drop -snapshot"
    )]
    SnapshotOfDisk { image: ImageAddress },
    #[error("--disk {image}: QEMU has no vhost-user-blk device for this machine")]
    NoDevice { image: ImageAddress },
    #[error("--disk {one} and --disk {other} have the same control={}; give each its own", path.display())]
    SameControl { one: String, other: String, path: PathBuf },
    #[error("--disk {one} and --disk {other} have the same cache={cache}; give each its own")]
    SameCache { one: String, other: String, cache: String },
    #[error("{option}: cannot determine the size of the guest's RAM; give a number and K, M, G or T, as in 2G")]
    RamSize { option: String },
    #[error("--memory-budget: {0}")]
    Memory(WishError),
    #[error("--memory-budget: {0}")]
    Budget(BudgetError),
    #[error("Larder does not know this machine's default size of RAM; give it with -m")]
    NoRamSize,
}

/// Plans the start of `command`, QEMU's program and arguments, with the additional disks of `--disk`.
///
/// # Errors
/// See [`PlanError`].
pub fn plan(command: &[OsString], extra: &[DiskWish], setting: &Setting<'_>) -> Result<Plan, PlanError> {
    let (program, words) = command.split_first().ok_or(PlanError::NoCommand)?;
    let arguments = split(words);
    let has = |names: &[&str]| {
        arguments
            .iter()
            .any(|argument| argument.name().is_some_and(|name| names.contains(&name)))
    };
    if has(&["daemonize"]) {
        return Err(PlanError::Daemonize);
    }
    if has(&["h", "help", "version"]) {
        return Ok(unchanged(command));
    }
    refuse_same_control(extra)?;
    refuse_same_cache(extra)?;
    let machine = Machine::of(program, &arguments);
    let warnings = warnings(&arguments_with_text(&arguments));
    let rewritten = |none: Option<Reason>| -> Result<_, PlanError> {
        let mut line = Rewrite::new(arguments.clone());
        let context = DiskContext {
            machine: &machine,
            version: setting.version,
            sockets: setting.sockets,
            left: setting.left,
            none,
        };
        let disks = disks::rewrite(&mut line, extra, &context)?;
        // QEMU needs only private memory for its own disks.
        let ram = match disks.is_empty() && setting.memory.is_none() {
            true => Ram::default(),
            false => ram::rewrite(&mut line, &machine, setting.ram)?,
        };
        Ok((line, disks, ram))
    };
    let (mut line, disks, ram) = match rewritten(None) {
        // QEMU knows the size, and the user requested nothing that requires Larder to know it.
        Err(error @ PlanError::NoRamSize) if extra.is_empty() && setting.memory.is_none() => {
            rewritten(Some(Reason(error.to_string())))
        }
        rewritten => rewritten,
    }?;
    let memory = setting.memory.map(|wish| PlannedMemory::new(wish, setting.sockets));
    if let Some(memory) = &memory {
        check_budget(&memory.wish, &ram.files)?;
    }
    let mut changes = std::mem::take(&mut line.changes);
    if disks.is_empty() {
        changes.push(match memory {
            Some(_) => "no disk is served: QEMU uses the disks of the command line itself".to_owned(),
            None => "no disk is served: QEMU is started with the command line as given".to_owned(),
        });
    }
    if let Some(memory) = &memory {
        changes.push(format!(
            "memory: kept within {}; larder memory status {}",
            memory.wish.budget,
            command_line(&[memory.control.clone().into()])
        ));
    }
    changes.extend(warnings);
    let mut qemu = vec![program.clone()];
    qemu.extend(line.into_words());
    Ok(Plan {
        qemu,
        disks,
        memory,
        ram: ram.files,
        folders: ram.folders,
        changes,
    })
}

/// Checks that the budget is valid, and sufficient for the known part of the RAM.
fn check_budget(wish: &MemoryWish, ram: &[RamFile]) -> Result<(), PlanError> {
    wish.check().map_err(PlanError::Memory)?;
    let bytes = ram.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    wish.check_for(bytes).map_err(PlanError::Budget)
}

/// Refuses a control socket shared by two disks; only `--disk` has control sockets.
fn refuse_same_control(extra: &[DiskWish]) -> Result<(), PlanError> {
    let controls: Vec<(&DiskWish, &Path)> = extra
        .iter()
        .filter_map(|disk| Some((disk, disk.control.as_deref()?)))
        .collect();
    match same_place(&controls) {
        Some((one, other)) => Err(PlanError::SameControl {
            one: one.image.to_string(),
            other: other.image.to_string(),
            path: other.control.clone().unwrap_or_default(),
        }),
        None => Ok(()),
    }
}

/// Refuses a cache shared by two disks.
fn refuse_same_cache(extra: &[DiskWish]) -> Result<(), PlanError> {
    let caches: Vec<(&DiskWish, &ImageAddress)> = extra
        .iter()
        .filter_map(|disk| Some((disk, disk.disk_cache.file.as_ref()?)))
        .collect();
    for (index, (other, cache)) in caches.iter().enumerate() {
        if let Some((one, _)) = caches[..index].iter().find(|(_, earlier)| is_same(earlier, cache)) {
            return Err(PlanError::SameCache {
                one: one.image.to_string(),
                other: other.image.to_string(),
                cache: cache.to_string(),
            });
        }
    }
    Ok(())
}

/// Returns a plan for a QEMU that only prints something and exits.
fn unchanged(command: &[OsString]) -> Plan {
    Plan {
        qemu: command.to_vec(),
        disks: Vec::new(),
        memory: None,
        ram: Vec::new(),
        folders: Vec::new(),
        changes: Vec::new(),
    }
}

fn arguments_with_text(arguments: &[super::arguments::Argument]) -> Vec<(&str, &str)> {
    let texts = arguments
        .iter()
        .filter_map(|argument| Some((argument.name()?, argument.text()?)));
    texts.collect()
}

/// Returns warnings about options that Larder does not see or cannot carry over, although the user may rely on them.
fn warnings(options: &[(&str, &str)]) -> Vec<String> {
    let lines = options.iter().filter_map(|(name, text)| match *name {
        "readconfig" => Some(format!("-readconfig {text}: not read; its disks stay with QEMU")),
        "global" if text.contains("virtio-blk") => Some(format!(
            "-global {text}: does not apply to the disks that Larder serves"
        )),
        _ => None,
    });
    lines.collect()
}

/// Returns the guest's name (`-name`), with characters that cannot be in a file name replaced; `vm` if it has none.
pub fn guest_name(command: &[OsString]) -> String {
    let arguments = split(command.get(1..).unwrap_or_default());
    let named = arguments.iter().rev().find_map(|argument| argument.text_of("name"));
    let list = KeyValues::parse(named.unwrap_or_default(), Some("guest"));
    let fit = |c: char| {
        if c.is_ascii_alphanumeric() || "._".contains(c) {
            c
        } else {
            '_'
        }
    };
    let name: String = list
        .get("guest")
        .unwrap_or_default()
        .chars()
        .map(fit)
        .take(40)
        .collect();
    if name.is_empty() { "vm".to_owned() } else { name }
}

/// Returns the program of a command.
///
/// # Errors
/// The command is empty.
pub fn program(command: &[OsString]) -> Result<&OsStr, PlanError> {
    command.first().map(OsString::as_os_str).ok_or(PlanError::NoCommand)
}

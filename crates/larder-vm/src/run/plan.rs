//! From QEMU's command line to what `larder run` starts instead: a pure function.

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

/// What is to be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// QEMU's program and arguments.
    pub qemu: Vec<OsString>,
    /// The disks to serve before it starts.
    pub disks: Vec<PlannedDisk>,
    /// How its memory is managed once it runs.
    pub memory: Option<PlannedMemory>,
    /// The files to make before it starts.
    pub ram: Vec<RamFile>,
    /// Paths that must be folders, or the user's files would be written to as RAM.
    pub folders: Vec<PathBuf>,
    /// What was changed, or left alone against expectation; a line each.
    pub changes: Vec<String>,
}

/// Where the user says what is to be served; advice must fit it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBy {
    /// `-drive if=virtio`.
    Drive,
    /// `-device virtio-blk-...` and its `-drive`.
    Device,
    /// `--disk`.
    Option,
    /// The file of a VM.
    File,
}

impl GivenBy {
    /// Where that is.
    pub(super) fn place(self) -> &'static str {
        match self {
            Self::Drive | Self::Device | Self::Option => "the command line",
            Self::File => "the file",
        }
    }

    /// How a disk is shared there.
    pub(super) fn share(self) -> &'static str {
        match self {
            Self::Drive | Self::Device | Self::Option => "share=on (share-rw=on at a -device)",
            Self::File => "share = true",
        }
    }
}

/// A disk, and the socket on which QEMU looks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedDisk {
    /// The disk.
    pub disk: DiskWish,
    /// Where the user speaks of it.
    pub given_by: GivenBy,
    /// Its socket.
    pub socket: PathBuf,
}

impl PlannedDisk {
    /// What is to be tried before it is served.
    pub fn to_check(&self) -> (&DiskWish, GivenBy) {
        (&self.disk, self.given_by)
    }

    /// The file that its server makes when it listens.
    pub fn ready_file(&self) -> PathBuf {
        self.socket.with_extension("pid")
    }

    /// Where its server listens while a keeper stands between it and QEMU.
    pub(super) fn server_socket(&self) -> PathBuf {
        self.socket.with_extension("server")
    }

    /// The arguments with which this program serves it to QEMU itself.
    pub fn serve_arguments(&self) -> Vec<OsString> {
        self.disk.serve_arguments(&self.socket, &self.ready_file())
    }

    /// The same, for the server that QEMU does not see. A restarted one opens the files that the first one has opened.
    pub fn kept_serve_arguments(&self) -> Vec<OsString> {
        let mut arguments = self.disk.serve_arguments(&self.server_socket(), &self.ready_file());
        arguments.extend(["--pin-chain".into(), self.chain_file().into()]);
        arguments
    }

    /// Where its first server writes down the files that it has opened.
    pub(super) fn chain_file(&self) -> PathBuf {
        self.socket.with_extension("chain")
    }
}

/// Where things go, and for which QEMU.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The QEMU that will run.
    pub version: QemuVersion,
    /// The folder for the sockets.
    pub sockets: &'a Path,
    /// The path of the RAM's file; further files get a number behind it.
    pub ram: &'a Path,
    /// Images that turned out to be nothing for Larder, and why: their drives stay with QEMU.
    pub left: &'a [(ImageAddress, Reason)],
    /// How the guest's memory is to be managed, if it is.
    pub memory: Option<&'a MemoryWish>,
}

/// Why a command line cannot be run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum PlanError {
    #[error("no QEMU command: give it behind --, as in larder run -- qemu-system-x86_64 -m 2G ...")]
    NoCommand,
    #[error(
        "-daemonize: larder run stays in the foreground with QEMU to serve its disks; drop the option, and run \
         larder itself as a service or with &"
    )]
    Daemonize,
    #[error(
        "--disk {image}: -snapshot does not reach it, the guest's writes would stay: add readonly=on, or drop -snapshot"
    )]
    SnapshotOfDisk { image: ImageAddress },
    #[error("--disk {image}: QEMU has no vhost-user-blk device for this machine")]
    NoDevice { image: ImageAddress },
    #[error("--disk {one} and --disk {other} have the same control={}; give each its own", path.display())]
    SameControl { one: String, other: String, path: PathBuf },
    #[error("--disk {one} and --disk {other} have the same cache={cache}; give each its own")]
    SameCache { one: String, other: String, cache: String },
    #[error("{option}: cannot tell the size of the guest's RAM; give a number and K, M, G or T, as in 2G")]
    RamSize { option: String },
    #[error("--memory-budget: {0}")]
    Memory(WishError),
    #[error("--memory-budget: {0}")]
    Budget(BudgetError),
    #[error("this machine's default size of RAM is not known to Larder; say it with -m")]
    NoRamSize,
}

/// Works out what to start for `command`, QEMU's program and arguments, with the disks of `--disk` besides.
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
        // Memory of its own is all that QEMU needs for its own disks.
        let ram = match disks.is_empty() && setting.memory.is_none() {
            true => Ram::default(),
            false => ram::rewrite(&mut line, &machine, setting.ram)?,
        };
        Ok((line, disks, ram))
    };
    let (mut line, disks, ram) = match rewritten(None) {
        // QEMU knows, and nothing was asked for that it cannot do.
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
            Some(_) => "no disk is served: QEMU has its disks as the command line says".to_owned(),
            None => "no disk is served: QEMU is started as the command line says".to_owned(),
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

/// Whether the budget makes sense, and is enough for what is known of the RAM.
fn check_budget(wish: &MemoryWish, ram: &[RamFile]) -> Result<(), PlanError> {
    wish.check().map_err(PlanError::Memory)?;
    let bytes = ram.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    wish.check_for(bytes).map_err(PlanError::Budget)
}

/// The control sockets of disks are of one each; only `--disk` has them.
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

/// A cache is of one disk.
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

/// QEMU only prints something and ends.
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

/// What Larder does not see or cannot carry over, and might be missed.
fn warnings(options: &[(&str, &str)]) -> Vec<String> {
    let lines = options.iter().filter_map(|(name, text)| match *name {
        "readconfig" => Some(format!("-readconfig {text}: not read; its disks stay with QEMU")),
        "global" if text.contains("virtio-blk") => {
            Some(format!("-global {text}: does not reach the disks that Larder serves"))
        }
        _ => None,
    });
    lines.collect()
}

/// The name of the guest (`-name`), as far as it can be part of a file's name; `vm` if it has none.
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

/// The program of a command.
///
/// # Errors
/// The command is empty.
pub fn program(command: &[OsString]) -> Result<&OsStr, PlanError> {
    command.first().map(OsString::as_os_str).ok_or(PlanError::NoCommand)
}

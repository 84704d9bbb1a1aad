//! The plan: a pure function from QEMU's command line to the processes that `larder run` starts.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::arguments::split;
use super::disks::{self, DiskContext};
use super::drive::QemuOnlyReason;
use super::keyval::KeyValues;
use super::machine::Machine;
use super::memory::PlannedMemory;
use super::ram::{self, RamFile, RamPlan};
use super::rewrite::CommandLineRewrite;
use super::shell::command_line;
use super::version::QemuVersion;
use crate::disk_spec::DiskSpec;
use crate::image::{ImageAddress, is_same_image};
use crate::listen::find_same_path;
use crate::memory::BudgetError;
use crate::memory::spec::{MemorySpec, MemorySpecError};

/// A plan of processes and resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunPlan {
    /// QEMU's program and arguments.
    pub qemu: Vec<OsString>,
    /// Disks to serve before QEMU starts.
    pub disks: Vec<PlannedDisk>,
    /// Management of QEMU's memory once it runs.
    pub memory: Option<PlannedMemory>,
    /// Files to create before QEMU starts.
    pub ram: Vec<RamFile>,
    /// Paths that must be directories: QEMU would write RAM to a file of the user's otherwise.
    pub directories: Vec<PathBuf>,
    /// Changes to the command line, and unexpected omissions; one line each.
    pub changes: Vec<String>,
}

/// Source of a disk's options, which determines how advice is worded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionSource {
    /// `-drive if=virtio`.
    Drive,
    /// `-device virtio-blk-...` and its `-drive`.
    Device,
    /// `--disk`.
    Option,
    /// The VM's file.
    File,
}

impl OptionSource {
    /// Returns the name of the source.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Drive | Self::Device | Self::Option => "the command line",
            Self::File => "the file",
        }
    }

    /// Returns how a disk is shared in that source's notation.
    pub(super) fn share_notation(self) -> &'static str {
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
    pub disk: DiskSpec,
    /// Source of the options.
    pub source: OptionSource,
    /// Socket for QEMU.
    pub socket: PathBuf,
}

impl PlannedDisk {
    /// Returns the parts that are checked before the disk is served.
    pub fn check_input(&self) -> (&DiskSpec, OptionSource) {
        (&self.disk, self.source)
    }

    /// Returns the file that the disk's server creates once it listens.
    pub fn ready_file(&self) -> PathBuf {
        self.socket.with_extension("pid")
    }

    /// Returns the socket of the server, if a proxy is between it and QEMU.
    pub(super) fn server_socket(&self) -> PathBuf {
        self.socket.with_extension("server")
    }

    /// Returns the arguments of a server to which QEMU connects directly.
    pub fn serve_arguments(&self) -> Vec<OsString> {
        self.disk.serve_arguments(&self.socket, &self.ready_file())
    }

    /// Returns the arguments of a server behind a proxy. A restarted server opens the same files as the first one.
    pub fn proxied_serve_arguments(&self) -> Vec<OsString> {
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
pub struct PlanEnvironment<'a> {
    /// Version of the QEMU that will run.
    pub version: QemuVersion,
    /// Directory for the sockets.
    pub sockets: &'a Path,
    /// Path of the RAM's file; further files get a number as a suffix.
    pub ram: &'a Path,
    /// Images that Larder cannot serve, with reasons: their drives stay with QEMU.
    pub left_to_qemu: &'a [(ImageAddress, QemuOnlyReason)],
    /// Options for managing the guest's memory, if it is to be managed.
    pub memory: Option<&'a MemorySpec>,
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
    DaemonizeUnsupported,
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
    InvalidMemory(MemorySpecError),
    #[error("--memory-budget: {0}")]
    BudgetTooSmall(BudgetError),
    #[error("Larder does not know this machine's default size of RAM; give it with -m")]
    NoRamSize,
}

/// Plans the start of `command`, QEMU's program and arguments, with the additional disks of `--disk`.
///
/// # Errors
/// See [`PlanError`].
pub fn plan(command: &[OsString], extra: &[DiskSpec], setting: &PlanEnvironment<'_>) -> Result<RunPlan, PlanError> {
    let (program, words) = command.split_first().ok_or(PlanError::NoCommand)?;
    let arguments = split(words);
    let has =
        |names: &[&str]| arguments.iter().any(|argument| argument.name().is_some_and(|name| names.contains(&name)));
    if has(&["daemonize"]) {
        return Err(PlanError::DaemonizeUnsupported);
    }
    if has(&["h", "help", "version"]) {
        return Ok(unchanged_plan(command));
    }
    check_distinct_controls(extra)?;
    check_distinct_caches(extra)?;
    let machine = Machine::parse(program, &arguments);
    let warnings = warnings(&text_arguments(&arguments));
    let rewritten = |none: Option<QemuOnlyReason>| -> Result<_, PlanError> {
        let mut line = CommandLineRewrite::new(arguments.clone());
        let context = DiskContext {
            machine: &machine,
            version: setting.version,
            sockets: setting.sockets,
            left_to_qemu: setting.left_to_qemu,
            leave_all_reason: none,
        };
        let disks = disks::rewrite_disks(&mut line, extra, &context)?;
        // QEMU needs only private memory for its own disks.
        let ram = match disks.is_empty() && setting.memory.is_none() {
            true => RamPlan::default(),
            false => ram::rewrite_ram(&mut line, &machine, setting.ram)?,
        };
        Ok((line, disks, ram))
    };
    let (mut line, disks, ram) = match rewritten(None) {
        // QEMU knows the size, and the user requested nothing that requires Larder to know it.
        Err(error @ PlanError::NoRamSize) if extra.is_empty() && setting.memory.is_none() => {
            rewritten(Some(QemuOnlyReason(error.to_string())))
        }
        rewritten => rewritten,
    }?;
    let memory = setting.memory.map(|spec| PlannedMemory::new(spec, setting.sockets));
    if let Some(memory) = &memory {
        check_budget(&memory.spec, &ram.files)?;
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
            memory.spec.budget,
            command_line(&[memory.control.clone().into()])
        ));
    }
    changes.extend(warnings);
    let mut qemu = vec![program.clone()];
    qemu.extend(line.into_words());
    Ok(RunPlan { qemu, disks, memory, ram: ram.files, directories: ram.directories, changes })
}

/// Checks that the budget is valid, and sufficient for the known part of the RAM.
fn check_budget(spec: &MemorySpec, ram: &[RamFile]) -> Result<(), PlanError> {
    spec.check().map_err(PlanError::InvalidMemory)?;
    let bytes = ram.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    spec.check_budget_for(bytes).map_err(PlanError::BudgetTooSmall)
}

/// Refuses a control socket shared by two disks; only `--disk` has control sockets.
fn check_distinct_controls(extra: &[DiskSpec]) -> Result<(), PlanError> {
    let controls: Vec<(&DiskSpec, &Path)> =
        extra.iter().filter_map(|disk| Some((disk, disk.control.as_deref()?))).collect();
    match find_same_path(&controls) {
        Some((one, other)) => Err(PlanError::SameControl {
            one: one.image.to_string(),
            other: other.image.to_string(),
            path: other.control.clone().unwrap_or_default(),
        }),
        None => Ok(()),
    }
}

/// Refuses a cache shared by two disks.
fn check_distinct_caches(extra: &[DiskSpec]) -> Result<(), PlanError> {
    let caches: Vec<(&DiskSpec, &ImageAddress)> =
        extra.iter().filter_map(|disk| Some((disk, disk.disk_cache.file.as_ref()?))).collect();
    for (index, (other, cache)) in caches.iter().enumerate() {
        if let Some((one, _)) = caches[..index].iter().find(|(_, earlier)| is_same_image(earlier, cache)) {
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
fn unchanged_plan(command: &[OsString]) -> RunPlan {
    RunPlan {
        qemu: command.to_vec(),
        disks: Vec::new(),
        memory: None,
        ram: Vec::new(),
        directories: Vec::new(),
        changes: Vec::new(),
    }
}

fn text_arguments(arguments: &[super::arguments::Argument]) -> Vec<(&str, &str)> {
    let texts = arguments.iter().filter_map(|argument| Some((argument.name()?, argument.value_str()?)));
    texts.collect()
}

/// Returns warnings about options that Larder does not see or cannot carry over, although the user may rely on them.
fn warnings(options: &[(&str, &str)]) -> Vec<String> {
    let lines = options.iter().filter_map(|(name, text)| match *name {
        "readconfig" => Some(format!("-readconfig {text}: not read; its disks stay with QEMU")),
        "global" if text.contains("virtio-blk") => {
            Some(format!("-global {text}: does not apply to the disks that Larder serves"))
        }
        _ => None,
    });
    lines.collect()
}

/// Returns the guest's name (`-name`), with characters that cannot be in a file name replaced; `vm` if it has none.
pub fn guest_name(command: &[OsString]) -> String {
    let arguments = split(command.get(1..).unwrap_or_default());
    let named = arguments.iter().rev().find_map(|argument| argument.value_str_of("name"));
    let list = KeyValues::parse(named.unwrap_or_default(), Some("guest"));
    let sanitize = |c: char| {
        if c.is_ascii_alphanumeric() || "._".contains(c) { c } else { '_' }
    };
    let name: String = list.get("guest").unwrap_or_default().chars().map(sanitize).take(40).collect();
    if name.is_empty() { "vm".to_owned() } else { name }
}

/// Returns the program of a command.
///
/// # Errors
/// The command is empty.
pub fn program(command: &[OsString]) -> Result<&OsStr, PlanError> {
    command.first().map(OsString::as_os_str).ok_or(PlanError::NoCommand)
}

//! Options of `larder memory`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::OsStringValueParser;
use clap::{Args, Subcommand, ValueEnum};
use larder_block::ByteLen;
use larder_vm::disk::POLL_US_MAX;
use larder_vm::image::ImageAddress;
use larder_vm::memory::range::BudgetRange;
use larder_vm::memory::spec::QUARANTINE_MS_MAX;

use super::{Output, image_parser};

#[derive(Subcommand)]
pub(crate) enum MemoryCommand {
    /// Keep the memory of a running QEMU, or of any process with shared memory, within a budget, until SIGTERM or
    /// until the process ends: cold pages are compressed, and paged in when they are touched
    Attach(Box<MemoryAttachArguments>),
    /// Show the state of the managed memory
    Status(MemoryStatusArguments),
    /// Change the budget
    Limit(MemoryLimitArguments),
    /// Bring all pages back into memory, and leave the process as it was. If there is no room for that (on the host,
    /// in a control group of the process, or in the tmpfs that its memory is a file of), nothing is changed; if room
    /// runs out, or at SIGINT, the memory is kept within its budget again
    Detach(MemoryDetachArguments),
}

#[derive(Args)]
pub(crate) struct MemoryAttachArguments {
    /// The process, by its PID
    #[arg(long, value_name = "PID", required_unless_present_any = ["qmp", "vm"], conflicts_with = "qmp")]
    pub(crate) pid: Option<u32>,
    /// The QEMU that listens on this QMP socket
    #[arg(long, value_name = "PATH")]
    pub(crate) qmp: Option<PathBuf>,
    /// The QEMUs of this virtual machine, one after the other, as [memory] in its file configures:
    /// /etc/larder/vms/NAME.toml, for users other than root ~/.config/larder/vms/NAME.toml, or the path of a file,
    /// with a / in it. SIGHUP rereads the file
    #[arg(long, value_name = "NAME", conflicts_with_all = ["pid", "qmp", "budget", "compressed", "swap_cache", "slow_store",
          "quarantine_ms", "prefetch", "encrypt", "wait", "control", "pidfile", "budget_min", "budget_low", "budget_high",
          "budget_max"])]
    pub(crate) vm: Option<PathBuf>,
    /// Wait until there is such a process and all of its memory exists: for a process that is just being started
    #[arg(long, conflicts_with = "pidfile")]
    pub(crate) wait: bool,
    /// Memory that may be used for the process in all: its resident pages, compressed pages, and the metadata of each
    /// page
    #[arg(long, value_name = "SIZE", required_unless_present = "vm")]
    pub(crate) budget: Option<ByteLen>,
    #[command(flatten)]
    pub(crate) range: BudgetRangeArguments,
    /// Part of the budget for compressed pages; by default half, or a 16th with a swap cache or a slow store
    #[arg(long, value_name = "SIZE")]
    pub(crate) compressed: Option<ByteLen>,
    /// Store for pages that do not fit into compressed RAM: a file (created if it does not exist, and removed at the
    /// end), a block device, or an NBD URI
    #[arg(long, value_name = "FILE", value_parser = image_parser())]
    pub(crate) swap_cache: Option<ImageAddress>,
    /// Maximum size of the swap cache; by default the whole file or device
    #[arg(long, value_name = "SIZE", requires = "swap_cache")]
    pub(crate) swap_size: Option<ByteLen>,
    /// Store for pages that do not fit into the swap cache: a file (created if it does not exist, and removed at the
    /// end), a block device, or an NBD URI
    #[arg(long, value_name = "FILE", value_parser = image_parser())]
    pub(crate) slow_store: Option<ImageAddress>,
    /// Maximum size of the slow store; by default the whole file or device
    #[arg(long, value_name = "SIZE", requires = "slow_store")]
    pub(crate) slow_size: Option<ByteLen>,
    /// Time that a page stays in memory after writes to it were stopped, so that device I/O that began before can
    /// end; by default 2000 for a process that has files open for direct I/O, else 0
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u64).range(..=QUARANTINE_MS_MAX))]
    pub(crate) quarantine_ms: Option<u64>,
    /// Poll up to this many microseconds for the next fault before sleeping
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u64).range(..=POLL_US_MAX))]
    pub(crate) poll_us: Option<u64>,
    /// Prefetch neighbouring pages where the process reads its memory sequentially
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub(crate) prefetch: Switch,
    /// Encrypt the pages in the swap cache and the slow store, with a key that is only in memory and ends with the
    /// process; on by default
    #[arg(long, value_name = "on|off")]
    pub(crate) encrypt: Option<Switch>,
    /// Unix socket on which to serve larder memory status, limit and detach
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Write this process's PID to this file once it is attached
    #[arg(long, value_name = "FILE")]
    pub(crate) pidfile: Option<PathBuf>,
}

/// Bounds within which larder host --balance-memory may move a budget.
#[derive(Args)]
pub(crate) struct BudgetRangeArguments {
    /// Minimum of the budget: larder host --balance-memory never goes below it. Without any of these four bounds it
    /// does not move the budget; a bound that is not given does not limit it
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget_min: Option<ByteLen>,
    /// Go below this only while the host runs short of memory and all other virtual machines are at theirs
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget_low: Option<ByteLen>,
    /// Go above this only with memory that no other virtual machine can use
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget_high: Option<ByteLen>,
    /// Maximum of the budget: never go above it
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget_max: Option<ByteLen>,
}

impl BudgetRangeArguments {
    /// Returns the bounds `before`, replaced by those that the command line gives.
    pub(crate) fn override_bounds(&self, before: BudgetRange) -> BudgetRange {
        let bytes = |given: Option<ByteLen>, before: Option<u64>| given.map(ByteLen::get).or(before);
        BudgetRange {
            min: bytes(self.budget_min, before.min),
            low: bytes(self.budget_low, before.low),
            high: bytes(self.budget_high, before.high),
            max: bytes(self.budget_max, before.max),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// Selects the pager that a command addresses.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct MemoryTargetArguments {
    /// Name of the virtual machine whose memory larder memory attach --vm manages; or, with a / in it, the path of a
    /// control socket
    #[arg(value_name = "NAME", value_parser = OsStringValueParser::new())]
    pub(crate) vm: Option<OsString>,
    /// The path that larder memory attach got with --control
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct MemoryStatusArguments {
    #[command(flatten)]
    pub(crate) at: MemoryTargetArguments,
    /// Output format: for people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct MemoryLimitArguments {
    #[command(flatten)]
    pub(crate) at: MemoryTargetArguments,
    /// Memory that may be used in all
    #[arg(long, value_name = "SIZE", required_unless_present_any = ["compressed", "budget_fixed", "budget_min",
          "budget_low", "budget_high", "budget_max"])]
    pub(crate) budget: Option<ByteLen>,
    /// Part of the budget for compressed pages
    #[arg(long, value_name = "SIZE")]
    pub(crate) compressed: Option<ByteLen>,
    #[command(flatten)]
    pub(crate) range: BudgetRangeArguments,
    /// Remove the bounds, so that the budget is not moved any more
    #[arg(long, conflicts_with_all = ["budget_min", "budget_low", "budget_high", "budget_max"])]
    pub(crate) budget_fixed: bool,
}

#[derive(Args)]
pub(crate) struct MemoryDetachArguments {
    #[command(flatten)]
    pub(crate) at: MemoryTargetArguments,
    /// Stop a detach in progress, whichever command or signal began it: the memory is kept within its budget again
    #[arg(long)]
    pub(crate) cancel: bool,
}

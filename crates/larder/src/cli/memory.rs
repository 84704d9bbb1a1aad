//! Options of `larder memory`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::OsStringValueParser;
use clap::{Args, Subcommand, ValueEnum};
use larder_block::ByteLen;
use larder_vm::disk::POLL_US_MAX;
use larder_vm::image::ImageAddress;
use larder_vm::memory::range::BudgetRange;
use larder_vm::memory::wish::QUARANTINE_MS_MAX;

use super::{Output, image_parser};

#[derive(Subcommand)]
pub(crate) enum MemoryCommand {
    /// Keep the memory of a running QEMU, or of any process that has it in shared memory, within a budget, until
    /// SIGTERM, or until it ends: what is cold is compressed, and comes back when it is touched
    Attach(Box<MemoryAttachArguments>),
    /// Say how the memory is
    Status(MemoryStatusArguments),
    /// Set another budget
    Limit(MemoryLimitArguments),
    /// Bring everything back into memory, and leave the process as it was. Where there is no room for that (on the host, in a
    /// control group of the process, or in the tmpfs that its memory is a file of) nothing is changed; where room runs out, or
    /// at SIGINT, the memory is kept within its budget again
    Detach(MemoryDetachArguments),
}

#[derive(Args)]
pub(crate) struct MemoryAttachArguments {
    /// The process
    #[arg(long, value_name = "PID", required_unless_present_any = ["qmp", "vm"], conflicts_with = "qmp")]
    pub(crate) pid: Option<u32>,
    /// The QEMU that listens on this QMP socket
    #[arg(long, value_name = "PATH")]
    pub(crate) qmp: Option<PathBuf>,
    /// The QEMUs of this virtual machine, one after the other, as [memory] in its file says: /etc/larder/vms/NAME.toml, for
    /// other users than root ~/.config/larder/vms/NAME.toml, or the path of a file, with a / in it. SIGHUP has it read
    /// again
    #[arg(long, value_name = "NAME", conflicts_with_all = ["pid", "qmp", "budget", "compressed", "swap_cache", "slow_store",
          "quarantine_ms", "prefetch", "encrypt", "wait", "control", "pidfile", "budget_min", "budget_low", "budget_high",
          "budget_max"])]
    pub(crate) vm: Option<PathBuf>,
    /// Wait until there is such a process, and all of its memory is there: for one that is only just being started
    #[arg(long, conflicts_with = "pidfile")]
    pub(crate) wait: bool,
    /// How much memory may be used for it in all: the pages that are in memory, compressed ones, and what is kept of
    /// each page
    #[arg(long, value_name = "SIZE", required_unless_present = "vm")]
    pub(crate) budget: Option<ByteLen>,
    #[command(flatten)]
    pub(crate) range: BudgetRangeArguments,
    /// How much of the budget may be compressed pages; by default half, or a 16th with a swap cache or a slow store
    #[arg(long, value_name = "SIZE")]
    pub(crate) compressed: Option<ByteLen>,
    /// Where pages go that compressed RAM has no room for: a file (made if it is not there, and removed in the end), a
    /// block device, or an NBD URI
    #[arg(long, value_name = "FILE", value_parser = image_parser())]
    pub(crate) swap_cache: Option<ImageAddress>,
    /// How large the swap cache may become; by default all of what is there
    #[arg(long, value_name = "SIZE", requires = "swap_cache")]
    pub(crate) swap_size: Option<ByteLen>,
    /// Where pages go that the swap cache has no room for, likewise
    #[arg(long, value_name = "FILE", value_parser = image_parser())]
    pub(crate) slow_store: Option<ImageAddress>,
    /// How large the slow store may become; by default all of what is there
    #[arg(long, value_name = "SIZE", requires = "slow_store")]
    pub(crate) slow_size: Option<ByteLen>,
    /// How long a page is left in memory after writes to it were stopped, for device I/O that has begun before to end;
    /// by default 2000 for a process that has files open for direct I/O, else 0
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u64).range(..=QUARANTINE_MS_MAX))]
    pub(crate) quarantine_ms: Option<u64>,
    /// For so many microseconds it is looked for the next fault before sleeping
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u64).range(..=POLL_US_MAX))]
    pub(crate) poll_us: Option<u64>,
    /// Whether pages are brought besides those that are wanted, where the process goes through its memory
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub(crate) prefetch: Switch,
    /// Whether what goes to the swap cache and the slow store is encrypted, with a key that is only in memory and ends with
    /// the process; on by default
    #[arg(long, value_name = "on|off")]
    pub(crate) encrypt: Option<Switch>,
    /// Where to listen for larder memory status, limit and detach
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Write the number of this process to this file once it is attached
    #[arg(long, value_name = "FILE")]
    pub(crate) pidfile: Option<PathBuf>,
}

/// Where larder host --balance-memory may move a budget to.
#[derive(Args)]
pub(crate) struct BudgetRangeArguments {
    /// Below this larder host --balance-memory never moves the budget. Without any of these four it moves it nowhere; what
    /// of them is not said is as wide as can be
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget_min: Option<ByteLen>,
    /// Below this only while the host runs short of memory and all other virtual machines are at theirs
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget_low: Option<ByteLen>,
    /// Above this only with memory that nobody else has use for
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget_high: Option<ByteLen>,
    /// Above this never
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget_max: Option<ByteLen>,
}

impl BudgetRangeArguments {
    /// The bounds that were said, in the place of those that there were.
    pub(crate) fn over(&self, before: BudgetRange) -> BudgetRange {
        let bytes = |said: Option<ByteLen>, before: Option<u64>| said.map(ByteLen::get).or(before);
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

/// Whose memory is asked for.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct MemoryAtArguments {
    /// The virtual machine's name, whose memory larder memory attach --vm manages; or with a / in it the path of a control
    /// socket
    #[arg(value_name = "NAME", value_parser = OsStringValueParser::new())]
    pub(crate) vm: Option<OsString>,
    /// The path that larder memory attach was given with --control
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct MemoryStatusArguments {
    #[command(flatten)]
    pub(crate) at: MemoryAtArguments,
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct MemoryLimitArguments {
    #[command(flatten)]
    pub(crate) at: MemoryAtArguments,
    /// How much memory may be used in all
    #[arg(long, value_name = "SIZE", required_unless_present_any = ["compressed", "budget_fixed", "budget_min",
          "budget_low", "budget_high", "budget_max"])]
    pub(crate) budget: Option<ByteLen>,
    /// How much of it may be compressed pages
    #[arg(long, value_name = "SIZE")]
    pub(crate) compressed: Option<ByteLen>,
    #[command(flatten)]
    pub(crate) range: BudgetRangeArguments,
    /// The budget is moved no more: its bounds are taken away
    #[arg(long, conflicts_with_all = ["budget_min", "budget_low", "budget_high", "budget_max"])]
    pub(crate) budget_fixed: bool,
}

#[derive(Args)]
pub(crate) struct MemoryDetachArguments {
    #[command(flatten)]
    pub(crate) at: MemoryAtArguments,
    /// Stop a detach that is under way, by whichever command or signal it was begun: the memory is kept within its budget again
    #[arg(long)]
    pub(crate) cancel: bool,
}

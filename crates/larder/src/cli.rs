//! The command line.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use larder_block::ByteLen;
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::filter::throttle::Limits;
use larder_block::nbd::NbdUri;
use larder_cache::Mode;
use larder_export::vhost_user::{QUEUE_SIZE_DEFAULT, QUEUE_SIZE_MAX, QUEUE_SIZE_MIN, QUEUES_MAX};
use larder_host::LISTEN_DEFAULT;
use larder_qcow2::check::CHECK_MEMORY_DEFAULT;
use larder_vm::disk::{POLL_US_MAX, RECONNECT_SECONDS_MAX};
use larder_vm::image::{
    CACHE_LINE_DEFAULT, CACHE_MODES, Format, ImageAddress, METADATA_MEMORY_DEFAULT, PrefetchMemory, PrefetchOptions,
    cache_mode_name, cache_mode_words, parse_cache_endurance, parse_cache_line, parse_cache_mode, parse_prefetch_len,
};
use larder_vm::limits::parse_given_limits;
use larder_vm::memory::range::BudgetRange;
use larder_vm::memory::wish::QUARANTINE_MS_MAX;
use larder_vm::wish::DiskWish;
use larder_vm::wish::keys::parse_disk;

/// Keeps what a QEMU virtual machine needs next close at hand.
#[derive(Parser)]
#[command(version, about, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
// There is one, and it does not move.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Command {
    /// Start QEMU with its virtio disks and its memory served by Larder
    Run(RunArguments),
    /// Serve all disks of a virtual machine, as its file says
    Vm(VmArguments),
    /// Serve disks, and look after their images
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Keep the memory of a running virtual machine within a budget
    #[command(subcommand)]
    Memory(MemoryCommand),
    /// Have Larder serve the disks of a domain of libvirt's
    #[command(subcommand)]
    Libvirt(LibvirtCommand),
    /// Show all virtual machines of this host to browsers and Prometheus
    Host(HostArguments),
    /// Say what a running server is doing
    Status(StatusArguments),
    /// Show all virtual machines and their disks at work, in the terminal
    Top(TopArguments),
    /// Say which virtual machines of this host are too large or too small, how many more fit, and whether it is a disk
    /// that they wait for; nothing is changed
    Advise(AdviseArguments),
    /// Measure what needs no virtual machine
    #[command(subcommand)]
    Bench(BenchCommand),
}

#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// Replay traces of disk accesses through the policy of Larder's disk cache, and through others
    Policy(BenchPolicyArguments),
}

#[derive(Args)]
pub(crate) struct BenchPolicyArguments {
    /// Traces: CloudPhysics' vscsi, or the ARC paper's lines; each may be compressed with zstd
    #[arg(value_name = "TRACE", required_unless_present = "synthetic")]
    pub(crate) traces: Vec<PathBuf>,
    /// Replay traces that are made up, too, each hard for some policy
    #[arg(long)]
    pub(crate) synthetic: bool,
    /// Sizes of the cache, in percent of what a trace touches
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "5,10,20,40",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) sizes: Vec<u32>,
    /// Size of the cache's lines; the blocks of the ARC paper's traces are a line each
    #[arg(long, value_name = "SIZE", default_value_t = ByteLen::new(4096))]
    pub(crate) line: ByteLen,
    /// What Larder may write to the SSD in a day
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget: Option<ByteLen>,
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct VmArguments {
    /// The virtual machine's name: its file is /etc/larder/vms/NAME.toml, for other users than root
    /// ~/.config/larder/vms/NAME.toml; or the path of a file, with a / in it
    #[arg(value_name = "NAME")]
    pub(crate) name: PathBuf,
    /// Say whether all disks could be served, and serve none; nothing is changed
    #[arg(long)]
    pub(crate) check: bool,
    /// Have the server that runs for this virtual machine read the file again, and say what has changed, what is left
    /// as it was until the server is started again, and what could not be done
    #[arg(long, conflicts_with = "check")]
    pub(crate) reload: bool,
    /// Once all that the file names is open, give up every right to open, start or look at anything else of this host: a
    /// guest that takes the server over has its own disks and no more. What needs another file takes a restart then
    #[arg(long, conflicts_with_all = ["check", "reload"])]
    pub(crate) confine: bool,
}

#[derive(Subcommand)]
pub(crate) enum LibvirtCommand {
    /// Say what would be changed to have a domain's virtio disks served by Larder, and with --apply change it
    Attach(LibvirtAttachArguments),
    /// Say what would be changed to give them back to QEMU, and with --apply change it
    Detach(LibvirtDetachArguments),
    /// Start and stop Larder with a domain: what libvirt's hook calls, with the domain's XML on standard input
    Hook(LibvirtHookArguments),
}

#[derive(Args)]
pub(crate) struct LibvirtAttachArguments {
    /// The domain, by its name, UUID or number
    #[arg(value_name = "DOMAIN")]
    pub(crate) domain: String,
    /// Change the domain's XML, and write the VM's file, /etc/larder/vms/DOMAIN.toml
    #[arg(long)]
    pub(crate) apply: bool,
    /// The libvirt that is meant; by default that which virsh chooses
    #[arg(long, short, value_name = "URI")]
    pub(crate) connect: Option<String>,
    /// Only this disk, as the domain names it (vda); may be given several times
    #[arg(long, value_name = "TARGET")]
    pub(crate) disk: Vec<String>,
    /// Give each disk a cache in this folder, which is on a fast device
    #[arg(long, value_name = "DIR", requires = "cache_size")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// How large each of these caches is made
    #[arg(long, value_name = "SIZE", requires = "cache_dir")]
    pub(crate) cache_size: Option<ByteLen>,
}

#[derive(Args)]
pub(crate) struct LibvirtDetachArguments {
    /// The domain, by its name, UUID or number
    #[arg(value_name = "DOMAIN")]
    pub(crate) domain: String,
    /// Change the domain's XML, and remove the VM's file
    #[arg(long)]
    pub(crate) apply: bool,
    /// The libvirt that is meant; by default that which virsh chooses
    #[arg(long, short, value_name = "URI")]
    pub(crate) connect: Option<String>,
}

#[derive(Args)]
pub(crate) struct LibvirtHookArguments {
    /// The domain's name
    #[arg(value_name = "NAME", allow_hyphen_values = true)]
    pub(crate) name: PathBuf,
    /// What libvirt does with it: prepare, release, reconnect; on anything else nothing is done
    #[arg(value_name = "OPERATION", allow_hyphen_values = true)]
    pub(crate) operation: String,
    /// Whether that begins or ends
    #[arg(value_name = "MOMENT", allow_hyphen_values = true)]
    pub(crate) moment: String,
    /// Of no use here
    #[arg(value_name = "EXTRA", allow_hyphen_values = true)]
    pub(crate) extra: Vec<OsString>,
}

#[derive(Subcommand)]
pub(crate) enum MemoryCommand {
    /// Keep the memory of a running QEMU, or of any process that has it in shared memory, within a budget, until
    /// SIGTERM, or until it ends: what is cold is compressed, and comes back when it is touched
    Attach(Box<MemoryAttachArguments>),
    /// Say how the memory is
    Status(MemoryStatusArguments),
    /// Set another budget
    Limit(MemoryLimitArguments),
    /// Bring everything back into memory, and leave the process as it was
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
    /// How much of the budget may be compressed pages; by default half, or a 16th with a swap cache
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
    /// the process
    #[arg(long, value_name = "on|off", default_value = "off")]
    pub(crate) encrypt: Switch,
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
}

#[derive(Args)]
pub(crate) struct HostArguments {
    /// Where to listen: an address with a port. Beyond this host only with --tls-certificates and --token-file
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = LISTEN_DEFAULT)]
    pub(crate) listen: SocketAddr,
    /// Speak TLS, with server-cert.pem and server-key.pem from this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_certificates: Option<PathBuf>,
    /// Only for whoever knows the first line of this file, which other users must not be able to read
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Move the budgets of virtual machines whose memory is managed with bounds (larder memory attach --budget-min and the
    /// like) to where they are needed
    #[arg(long)]
    pub(crate) balance_memory: bool,
    /// How much of the host's memory is to stay free
    #[arg(long, value_name = "SIZE", default_value_t = ByteLen::mib(1024), requires = "balance_memory")]
    pub(crate) memory_reserve: ByteLen,
    /// For which share of the time a virtual machine may wait for memory before it gets more
    #[arg(long, value_name = "PERCENT", default_value = "1%", value_parser = parse_share, requires = "balance_memory")]
    pub(crate) memory_stall: f64,
    /// From one look at the virtual machines to the next
    #[arg(long, value_name = "TIME", default_value = "6s", value_parser = parse_period, requires = "balance_memory")]
    pub(crate) memory_period: Duration,
}

#[derive(Args)]
pub(crate) struct StatusArguments {
    /// The virtual machine's name, or with a / in it the path of a control socket; without it all virtual machines
    #[arg(value_parser = OsStringValueParser::new())]
    pub(crate) vm: Option<OsString>,
    /// Every so many seconds what was done since the last time, first since the start of the server
    #[arg(value_parser = OsStringValueParser::new())]
    pub(crate) interval: Option<OsString>,
    /// So many times
    #[arg(value_parser = OsStringValueParser::new())]
    pub(crate) count: Option<OsString>,
    /// For people, or for programs: of one virtual machine as the control socket answers GET /v1/disks; with an
    /// interval a line each time
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct TopArguments {
    /// Print what is done, as `larder status` at intervals, instead of showing it
    #[arg(long, short)]
    pub(crate) batch: bool,
    /// Seconds between two looks
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = parse_delay)]
    pub(crate) delay: f64,
    /// Look so many times, then end
    #[arg(long, short = 'n', value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
}

#[derive(Args)]
pub(crate) struct AdviseArguments {
    /// For how long to look: 500ms, 10s, 5m or 1h; at least 5s to say how many vCPUs a virtual machine needs
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = parse_window)]
    pub(crate) window: Duration,
    /// Say only whether one more virtual machine with so much memory would fit, and end with 0 if it does, 1 if not, 3
    /// if only with over-commit or at a stall above the accepted one, 4 if that cannot be told
    #[arg(long, value_name = "SIZE")]
    pub(crate) would_fit: Option<ByteLen>,
    /// Memory that virtual machines are not to have, besides what others use now
    #[arg(long, value_name = "SIZE", default_value_t = ByteLen::mib(1024))]
    pub(crate) reserve: ByteLen,
    /// How much of the host's memory may be active
    #[arg(long, value_name = "PERCENT", default_value = "80%", value_parser = parse_share)]
    pub(crate) active_share: f64,
    /// How much virtual machines may be given in all, of the host's memory
    #[arg(long, value_name = "PERCENT", default_value = "150%", value_parser = parse_overcommit)]
    pub(crate) overcommit: f64,
    /// For which share of the time waiting for memory is accepted
    #[arg(long, value_name = "PERCENT", default_value = "5%", value_parser = parse_share)]
    pub(crate) stall: f64,
    /// How long a request to a disk may take on average before the disk is called slow
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = parse_latency)]
    pub(crate) disk_latency: Duration,
    /// Ask at this control socket, too; may be given several times. Those of VMs with a file, larder disk serve and
    /// larder memory attach are found
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Vec<PathBuf>,
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

/// From 0 to 1, of `80%`.
fn parse_share(text: &str) -> Result<f64, String> {
    let share = parse_percent(text).filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "give percent from 0% to 100%, as in 80%".to_owned())
}

/// From 1 on.
fn parse_overcommit(text: &str) -> Result<f64, String> {
    let share = parse_percent(text).filter(|share| (1.0..=10.0).contains(share));
    share.ok_or_else(|| "give percent from 100% (no over-commit) to 1000%, as in 150%".to_owned())
}

fn parse_percent(text: &str) -> Option<f64> {
    let number = text.strip_suffix('%').unwrap_or(text).trim_end();
    Some(number.parse::<f64>().ok()? / 100.0)
}

fn parse_window(text: &str) -> Result<Duration, String> {
    let window = parse_time(text).filter(|time| (WINDOW_MIN..=WINDOW_MAX).contains(time));
    window.ok_or_else(|| "give a time from 100ms to 24h, as in 500ms, 10s, 5m or 1h".to_owned())
}

fn parse_latency(text: &str) -> Result<Duration, String> {
    let latency = parse_time(text).filter(|time| !time.is_zero() && *time <= LATENCY_MAX);
    latency.ok_or_else(|| "give a time from 1us to 60s, as in 500us or 20ms".to_owned())
}

fn parse_period(text: &str) -> Result<Duration, String> {
    let period = parse_time(text).filter(|time| (WINDOW_MIN..=PERIOD_MAX).contains(time));
    period.ok_or_else(|| "give a time from 100ms to 10m, as in 6s".to_owned())
}

const PERIOD_MAX: Duration = Duration::from_secs(600);

/// A shorter look sees less than a few turns of the scheduler's.
const WINDOW_MIN: Duration = Duration::from_millis(100);
const WINDOW_MAX: Duration = Duration::from_secs(24 * 3600);
const LATENCY_MAX: Duration = Duration::from_secs(60);

/// A whole number and its unit.
fn parse_time(text: &str) -> Option<Duration> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    Some(match unit.trim_start() {
        "us" => Duration::from_micros(number),
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "m" => Duration::from_secs(number.checked_mul(60)?),
        "h" => Duration::from_secs(number.checked_mul(3600)?),
        _ => return None,
    })
}

fn parse_delay(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds from 0.1 to 86400".to_owned()),
    }
}

#[derive(Args)]
pub(crate) struct RunArguments {
    /// One more disk: IMAGE[,KEY=VALUE]... with format=raw|qcow2, serial, readonly=on, share=on,
    /// cache=direct|buffered, discard=unmap|ignore, queues, queue-size, block-size, poll-us, metadata-memory,
    /// prefetch=SIZE|off, prefetch-ahead, prefetch-largest-read, cache=FILE with cache-size, cache-line, cache-mode
    /// and cache-endurance, control=PATH, nbd-reconnect, and limits such as iops=1000 or bps=100M; a comma in IMAGE is
    /// doubled
    #[arg(long, value_name = "IMAGE,...", value_parser = parse_disk)]
    pub(crate) disk: Vec<DiskWish>,
    /// Keep the guest's memory within so much of the host's, as larder memory attach does
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory_budget: Option<ByteLen>,
    /// How much of the budget may be compressed pages; by default half, or a 16th with a swap cache
    #[arg(long, value_name = "SIZE", requires = "memory_budget")]
    pub(crate) memory_compressed: Option<ByteLen>,
    /// Where pages go that compressed RAM has no room for: a file (made if it is not there, and removed in the end), a
    /// block device, or an NBD URI
    #[arg(long, value_name = "FILE", value_parser = image_parser(), requires = "memory_budget")]
    pub(crate) memory_swap_cache: Option<ImageAddress>,
    /// How large the swap cache may become; by default all of what is there
    #[arg(long, value_name = "SIZE", requires = "memory_swap_cache")]
    pub(crate) memory_swap_size: Option<ByteLen>,
    /// Where pages go that the swap cache has no room for, likewise
    #[arg(long, value_name = "FILE", value_parser = image_parser(), requires = "memory_budget")]
    pub(crate) memory_slow_store: Option<ImageAddress>,
    /// How large the slow store may become; by default all of what is there
    #[arg(long, value_name = "SIZE", requires = "memory_slow_store")]
    pub(crate) memory_slow_size: Option<ByteLen>,
    /// Whether what goes to the swap cache and the slow store is encrypted, with a key that is only in memory and ends with
    /// QEMU
    #[arg(long, value_name = "on|off", default_value = "off", requires = "memory_budget")]
    pub(crate) memory_encrypt: Switch,
    /// Check the images and print the commands that would be started, ready to paste, and start nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print the commands that are started, and what the disks' servers have to say
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// QEMU's program and arguments
    #[arg(last = true, required = true, value_name = "QEMU COMMAND")]
    pub(crate) qemu: Vec<OsString>,
}

#[derive(Subcommand)]
// As above.
#[allow(clippy::large_enum_variant)]
pub(crate) enum DiskCommand {
    /// Serve a disk image to a guest or to tools
    Serve(ServeArguments),
    /// Say what an image is, also one that is in use
    Info(ImageArguments),
    /// Check a qcow2 image's metadata, and repair it
    Check(CheckArguments),
    /// Say what the size of a qcow2 image's tables means for its speed
    Tune(ImageArguments),
    /// Make a disk larger, while nobody uses it
    Resize(ResizeArguments),
    /// Look after a disk's cache
    #[command(subcommand)]
    Cache(CacheCommand),
}

#[derive(Subcommand)]
pub(crate) enum CacheCommand {
    /// Say whose a cache is and what it holds, also of one that is in use
    Info(CacheInfoArguments),
    /// Change what a cache does with writes
    Mode(CacheModeArguments),
    /// Write to the disk what only its cache has (write-back)
    Flush(CacheFlushArguments),
    /// Give a disk in use another cache, or its cache that had failed, while the guest runs
    Replace(CacheReplaceArguments),
    /// Make the file of a cache larger or smaller with what it holds, while nobody uses it
    Resize(CacheResizeArguments),
    /// Make a cache none any more, while nobody uses it
    Drop(CacheDropArguments),
}

#[derive(Args)]
pub(crate) struct CacheInfoArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct CacheModeArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    #[arg(value_name = "MODE", value_parser = parse_cache_mode, help = cache_mode_help())]
    pub(crate) mode: Mode,
    /// The control socket of the server that uses it
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct CacheFlushArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// The control socket of the server that uses it
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Where its disk is, if that has been moved since the cache was last used
    #[arg(long, value_name = "IMAGE", value_parser = image_parser(), conflicts_with = "control")]
    pub(crate) image: Option<ImageAddress>,
    /// Also if the disk seems to have been changed without the cache: what the cache has is written over that
    #[arg(long, conflicts_with = "control")]
    pub(crate) force: bool,
}

#[derive(Args)]
pub(crate) struct CacheReplaceArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// The control socket of the server that uses it
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// What the new cache is on: a file, which is made if it is not there, a block device, or an NBD export; by default
    /// where the cache is, whose device had failed and works again
    #[arg(long, value_name = "NEW", value_parser = image_parser())]
    pub(crate) with: Option<ImageAddress>,
    /// How large the new file is made; by default as large as the old cache
    #[arg(long, requires = "with")]
    pub(crate) size: Option<ByteLen>,
    /// Also if the old cache, which has failed, has data that was never written to its disk
    #[arg(long, requires = "with")]
    pub(crate) lose_dirty: bool,
}

#[derive(Args)]
pub(crate) struct CacheResizeArguments {
    /// The file that the cache is in
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// How large the file shall be
    pub(crate) size: ByteLen,
}

#[derive(Args)]
pub(crate) struct CacheDropArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// Also if it may have data that was never written to its disk
    #[arg(long)]
    pub(crate) lose_dirty: bool,
}

/// What the commands about one image have in common.
#[derive(Args)]
pub(crate) struct ImageArguments {
    /// A disk image, a block device, or an NBD URI
    #[arg(value_parser = image_parser())]
    pub(crate) image: ImageAddress,
    /// The image's format; by default what it begins like
    #[arg(long)]
    pub(crate) format: Option<FormatName>,
    /// For people, or for programs, with the field names of qemu-img where it has them
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct CheckArguments {
    #[command(flatten)]
    pub(crate) of: ImageArguments,
    /// Mend what is wrong; nobody else may use the image meanwhile
    #[arg(long, value_name = "WHAT", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    pub(crate) repair: Option<RepairName>,
    /// Give up what a killed server's journal has that is not in the image, or would have if it were found; it is what
    /// a guest has written since it last flushed
    #[arg(long)]
    pub(crate) discard_journal: bool,
    /// What counting references may take
    #[arg(long, value_name = "SIZE", default_value_t = CHECK_MEMORY_DEFAULT)]
    pub(crate) memory: ByteLen,
}

#[derive(Args)]
pub(crate) struct ResizeArguments {
    #[command(flatten)]
    pub(crate) of: ImageArguments,
    /// Its new size, or with a + how much larger it gets: 40G, +512M
    #[arg(value_name = "[+]SIZE", value_parser = parse_new_size, allow_hyphen_values = true)]
    pub(crate) size: NewSize,
}

/// How large a disk is to be.
#[derive(Clone, Copy)]
pub(crate) enum NewSize {
    /// So large.
    Is(ByteLen),
    /// Larger by so much.
    More(ByteLen),
}

fn parse_new_size(text: &str) -> Result<NewSize, String> {
    let size = |text: &str| text.parse::<ByteLen>().map_err(|error| error.to_string());
    if text.strip_prefix('-').is_some_and(|less| size(less).is_ok()) {
        return Err("a disk is never made smaller: that throws away what is behind its new end".to_owned());
    }
    match text.strip_prefix('+') {
        Some(more) => size(more).map(NewSize::More),
        None => size(text).map(NewSize::Is),
    }
}

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Lines for people
    Text,
    /// A JSON object
    Json,
}

/// What a repair mends.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RepairName {
    /// Leaked clusters only
    Leaks,
    /// Everything that can be
    All,
}

/// How image formats are named.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum FormatName {
    /// The disk itself, byte for byte
    Raw,
    /// QEMU's format, with its backing files
    Qcow2,
}

impl From<FormatName> for Format {
    fn from(name: FormatName) -> Self {
        match name {
            FormatName::Raw => Self::Raw,
            FormatName::Qcow2 => Self::Qcow2,
        }
    }
}

/// What becomes of a guest's discards.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DiscardPolicy {
    /// Free the space in the image
    Unmap,
    /// Ignore them: the image stays allocated
    Ignore,
}

fn parse_poll_us(text: &str) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(us) if us <= POLL_US_MAX => Ok(us),
        Ok(_) => Err(format!(
            "at most {POLL_US_MAX} microseconds (10 ms): a thread that spins keeps a processor busy"
        )),
        Err(_) => Err(format!("not a whole number of microseconds from 0 to {POLL_US_MAX}")),
    }
}

fn parse_queue_size(text: &str) -> Result<u16, String> {
    let size = text.parse().ok().filter(|size: &u16| size.is_power_of_two());
    size.filter(|size| (QUEUE_SIZE_MIN..=QUEUE_SIZE_MAX).contains(size))
        .ok_or_else(|| {
            format!("give a power of two from {QUEUE_SIZE_MIN} to {QUEUE_SIZE_MAX}; virtqueues have no other size")
        })
}

/// An image may be a path that is not text.
fn image_parser() -> impl TypedValueParser<Value = ImageAddress> {
    OsStringValueParser::new().try_map(|argument| ImageAddress::from_argument(&argument))
}

fn prefetch_help() -> String {
    format!(
        "Memory for reading ahead: SIZE ({} to {}), or off; nothing is read ahead with --share [default: {}]",
        PrefetchOptions::MEMORY_MIN,
        PrefetchOptions::MEMORY_MAX,
        PrefetchMemory::DEFAULT
    )
}

fn prefetch_largest_read_help() -> String {
    let usual = PrefetchOptions::default().largest_read;
    format!(
        "Reads that are longer than this are not read ahead of; their copy costs more than is gained [default: {usual}]"
    )
}

fn prefetch_ahead_help() -> String {
    let usual = PrefetchOptions::default().ahead_max;
    format!("How far ahead of a reader to be at most [default: {usual}]")
}

fn cache_mode_help() -> String {
    let modes = CACHE_MODES.map(|mode| format!("{} ({})", cache_mode_name(mode), cache_mode_words(mode)));
    format!("What the cache does with writes: {}", modes.join(", "))
}

fn served_cache_mode_help() -> String {
    let usual = cache_mode_name(Mode::default());
    format!("{} [default: as it was left, or {usual}]", cache_mode_help())
}

fn cache_line_help() -> String {
    format!("Size of the cache's lines, once and for all, up to 64KiB [default: {CACHE_LINE_DEFAULT}]")
}

#[derive(Args)]
pub(crate) struct ServeArguments {
    /// A disk image, a block device, or an NBD URI
    #[arg(required_unless_present_any = ["blk_file", "print_capabilities"], conflicts_with = "blk_file",
          value_parser = image_parser())]
    pub(crate) image: Option<ImageAddress>,
    /// The image's format; by default what it begins like
    #[arg(long)]
    pub(crate) format: Option<FormatName>,
    /// What the metadata cache of a qcow2 image may hold; by default as much as the disk needs, up to 256MiB
    #[arg(long, value_name = "SIZE", default_value_t = METADATA_MEMORY_DEFAULT)]
    pub(crate) metadata_memory: ByteLen,
    #[arg(long, value_name = "SIZE|off", help = prefetch_help())]
    pub(crate) prefetch: Option<PrefetchMemory>,
    #[arg(long, value_name = "SIZE", value_parser = parse_prefetch_len, help = prefetch_largest_read_help())]
    pub(crate) prefetch_largest_read: Option<ByteLen>,
    #[arg(long, value_name = "SIZE", value_parser = parse_prefetch_len, help = prefetch_ahead_help())]
    pub(crate) prefetch_ahead: Option<ByteLen>,
    /// Keep what is used much on this file, block device or NBD export, which is faster than the image: its cache, and no
    /// other image's. A file that is not there is made
    #[arg(long, value_name = "FILE", value_parser = image_parser())]
    pub(crate) cache: Option<ImageAddress>,
    /// How large the cache's file is made
    #[arg(long, value_name = "SIZE")]
    pub(crate) cache_size: Option<ByteLen>,
    #[arg(long, value_name = "MODE", value_parser = parse_cache_mode, help = served_cache_mode_help())]
    pub(crate) cache_mode: Option<Mode>,
    #[arg(long, value_name = "SIZE", value_parser = parse_cache_line, help = cache_line_help())]
    pub(crate) cache_line: Option<ByteLen>,
    /// Write no more to the cache's device in a day: an SSD wears out
    #[arg(long, value_name = "SIZE", value_parser = parse_cache_endurance)]
    pub(crate) cache_endurance: Option<ByteLen>,
    /// Serve vhost-user-blk on this unix socket
    #[arg(long, visible_alias = "socket-path", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Serve vhost-user-blk on this inherited descriptor: a listening or connected unix socket
    #[arg(long, value_name = "FD", conflicts_with = "socket")]
    pub(crate) fd: Option<RawFd>,
    /// Serve NBD: nbd+unix:///EXPORT?socket=PATH, nbd://ADDRESS[:PORT]/EXPORT, or nbds://...?tls-certificates=DIR
    #[arg(long, value_name = "URI")]
    pub(crate) nbd: Option<NbdUri>,
    /// Serve NBD to other hosts without TLS: anyone who reaches the port can read and write the disk
    #[arg(long, requires = "nbd")]
    pub(crate) nbd_insecure: bool,
    /// Refuse changes
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Let other processes use the image at the same time; you answer for what that does
    #[arg(long)]
    pub(crate) share: bool,
    /// Go through the host's page cache instead of direct I/O
    #[arg(long)]
    pub(crate) buffered: bool,
    /// What becomes of discards
    #[arg(long, value_name = "POLICY", default_value = "unmap")]
    pub(crate) discard: DiscardPolicy,
    /// Limits per second: KEY=VALUE,... with iops-total, iops-read, iops-write, bps-total, bps-read, bps-write,
    /// each also with -max and -max-length for bursts, and iops-size; QEMU's older names and libvirt's are known too
    #[arg(long, value_name = "LIMITS", value_parser = parse_given_limits)]
    pub(crate) throttle: Option<Limits>,
    /// Virtqueues offered, over vhost-user-blk
    #[arg(long, value_name = "N", default_value_t = QUEUES_MAX)]
    pub(crate) queues: u16,
    /// Descriptors that the front-end gives each virtqueue (QEMU's queue-size), a power of two from 4 to 1024: larger
    /// ones take larger requests
    #[arg(long, value_name = "N", default_value_t = QUEUE_SIZE_DEFAULT, value_parser = parse_queue_size)]
    pub(crate) queue_size: u16,
    /// Serial number that the guest sees over vhost-user-blk, up to 20 bytes
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) serial: String,
    /// Sector size that the guest sees over vhost-user-blk, in bytes: 512 or 4096
    #[arg(long, value_name = "BYTES", default_value_t = 512)]
    pub(crate) block_size: u32,
    /// Spin up to this many microseconds for the next request before sleeping, 10000 at most; 0 sleeps at once
    #[arg(long, value_name = "US", default_value_t = POLL_MAX_DEFAULT.as_micros() as u64, value_parser = parse_poll_us)]
    pub(crate) poll_us: u64,
    /// How long requests wait for an NBD server that is away before they fail, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(..=RECONNECT_SECONDS_MAX))]
    pub(crate) nbd_reconnect: u64,
    /// Tell on this unix socket how the disk is: `larder status PATH`, or HTTP (GET /v1/disks)
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Write the process's number to this file once the disk is served
    #[arg(long, value_name = "PATH")]
    pub(crate) pidfile: Option<PathBuf>,
    /// The image, as vhost-user's conventions name it
    #[arg(long, value_name = "PATH", value_parser = image_parser())]
    pub(crate) blk_file: Option<ImageAddress>,
    /// Print what this back-end can do, as vhost-user's conventions want it, and exit
    #[arg(long)]
    pub(crate) print_capabilities: bool,
    /// QEMU's locks on the image's files are held by the process that starts this one, checked: what `larder run` says
    #[arg(long, hide = true)]
    pub(crate) inherit_locks: bool,
}

/// Says which argument it is that is not UTF-8 although it should be.
pub(crate) fn name_what_is_no_text(error: clap::Error) -> clap::Error {
    if error.kind() != ErrorKind::InvalidUtf8 {
        return error;
    }
    let suspects: Vec<String> = std::env::args_os()
        .filter(|argument| argument.to_str().is_none())
        .map(|argument| format!("'{}'", argument.to_string_lossy()))
        .collect();
    let which = match suspects.as_slice() {
        [one] => format!("{one} is not UTF-8; only paths need not be"),
        many => format!("one of {} should be UTF-8; only paths need not be", many.join(", ")),
    };
    Cli::command().error(ErrorKind::InvalidUtf8, which)
}

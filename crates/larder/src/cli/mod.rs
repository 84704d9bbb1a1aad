//! The command line.

// Documentation comments of arguments are help texts, in which brackets are no links.
#![allow(rustdoc::broken_intra_doc_links)]

pub(crate) mod address;
pub(crate) mod bench;
pub(crate) mod memory;
pub(crate) mod migrate;
pub(crate) mod watch;

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use larder_block::ByteLen;
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::filter::throttle::ThrottleLimits;
use larder_block::nbd::{ExportDescription, NbdUri};
use larder_cache::CacheMode;
use larder_export::vhost_user::{QUEUE_SIZE_DEFAULT, QUEUE_SIZE_MAX, QUEUE_SIZE_MIN, QUEUES_MAX};
use larder_qcow2::check::CHECK_MEMORY_DEFAULT;
use larder_vm::disk::{POLL_US_MAX, RECONNECT_SECONDS_MAX};
use larder_vm::disk_spec::DiskSpec;
use larder_vm::disk_spec::keys::parse_disk;
use larder_vm::image::{
    CACHE_LINE_DEFAULT, CACHE_MODES, Format, ImageAddress, METADATA_MEMORY_DEFAULT, PrefetchMemory, PrefetchOptions,
    cache_mode_long_name, cache_mode_name, parse_cache_endurance, parse_cache_line, parse_cache_mode,
    parse_prefetch_len,
};
use larder_vm::limits::parse_nonempty_limits;

use self::bench::BenchCodecArguments;
use self::memory::{MemoryCommand, Switch};
use self::migrate::MigrateArguments;
use self::watch::{AdviseArguments, HostArguments, StatusArguments, TopArguments};

/// Keeps the data that a QEMU virtual machine needs next close at hand.
#[derive(Parser)]
#[command(version, about, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
// A process has one `Command`, which is not moved, so its size does not matter.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Command {
    /// Start QEMU with its virtio disks and its memory served by Larder
    Run(RunArguments),
    /// Serve all disks of a virtual machine, as configured in its file
    Vm(VmArguments),
    /// Serve disks, and manage their images
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Keep the memory of a running virtual machine within a budget
    #[command(subcommand)]
    Memory(MemoryCommand),
    /// Move a running virtual machine to another host, with its memory compressed on the way
    Migrate(Box<MigrateArguments>),
    /// Have Larder serve the disks of a libvirt domain
    #[command(subcommand)]
    Libvirt(LibvirtCommand),
    /// Show all virtual machines of this host to browsers and Prometheus
    Host(HostArguments),
    /// Show the activity of a running server
    Status(StatusArguments),
    /// Show all virtual machines and their disks at work, in the terminal
    Top(TopArguments),
    /// Report which virtual machines of this host are too large or too small, how many more fit, and whether they
    /// wait for a disk; nothing is changed
    Advise(AdviseArguments),
    /// Run benchmarks that need no virtual machine
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Open files for the confined server at the other end of the socket that is standard input
    #[command(hide = true)]
    Open(OpenArguments),
}

#[derive(Args)]
pub(crate) struct OpenArguments {
    /// The file of the server's virtual machine; without it, the file of the service larder@NAME.service that the
    /// server runs as
    pub(crate) file: Option<PathBuf>,
}

#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// Replay traces of disk accesses through the policy of Larder's disk cache, and through other policies
    Policy(BenchPolicyArguments),
    /// Measure each method by which a migration makes pages of memory smaller, and the accelerators of this host:
    /// their cost and their compression ratio
    Codec(BenchCodecArguments),
}

#[derive(Args)]
pub(crate) struct BenchPolicyArguments {
    /// Traces: CloudPhysics' vscsi, or the ARC paper's lines; each may be compressed with zstd
    #[arg(value_name = "TRACE", required_unless_present = "synthetic")]
    pub(crate) traces: Vec<PathBuf>,
    /// Replay synthetic traces as well, each of which is hard for some policy
    #[arg(long)]
    pub(crate) synthetic: bool,
    /// Sizes of the cache, in percent of a trace's footprint
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "5,10,20,40",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) sizes: Vec<u32>,
    /// Size of the cache's lines; each block of the ARC paper's traces is a line
    #[arg(long, value_name = "SIZE", default_value_t = ByteLen::new(4096))]
    pub(crate) line: ByteLen,
    /// Maximum number of bytes that Larder may write to the SSD per day
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget: Option<ByteLen>,
    /// Output format: for people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct VmArguments {
    /// The virtual machine's name: its file is /etc/larder/vms/NAME.toml, for users other than root
    /// ~/.config/larder/vms/NAME.toml; or the path of a file, with a / in it
    #[arg(value_name = "NAME")]
    pub(crate) name: PathBuf,
    /// Check whether all disks could be served, and serve none; nothing is changed
    #[arg(long)]
    pub(crate) check: bool,
    /// Add to the file the settings of its disks that it leaves open: the detected format of each image, and the
    /// files that the images' headers name. Review the additions: the author of an image chose the files that its
    /// header names
    #[arg(long, conflicts_with = "check")]
    pub(crate) pin: bool,
    /// Have the running server of this virtual machine reread the file, and report what changed, what needs a restart
    /// of the server, and what failed
    #[arg(long, conflicts_with_all = ["check", "pin"])]
    pub(crate) reload: bool,
    /// Give up every right to open, start or inspect anything on this host before an image or a guest's request is
    /// read: an attacker who takes over the server has its own disks and no more. A separate process opens the files
    /// that the VM's file names. With --check: check whether a confined server could serve the disks
    #[arg(long, conflicts_with_all = ["pin", "reload"])]
    pub(crate) confine: bool,
    /// Have the files opened by the opener that listens on this socket (larder-open.socket), for a service with its
    /// own user
    #[arg(long, value_name = "SOCKET", requires = "confine", conflicts_with = "check")]
    pub(crate) opener: Option<PathBuf>,
    /// Open no image before the virtual machine arrives from another host (larder migrate), which has the images open
    /// until then. Its QEMU, started with -incoming, can connect earlier
    #[arg(long, conflicts_with_all = ["check", "pin", "reload", "expect", "take"])]
    pub(crate) incoming: bool,
    /// Have the next server, or a running one without a guest, wait for the virtual machine as with --incoming; then
    /// exit
    #[arg(long, conflicts_with_all = ["check", "pin", "reload", "confine", "take"])]
    pub(crate) expect: bool,
    /// Have the server open the images of a virtual machine that was moved to another host, or was expected from one,
    /// then exit. Use it only if no other host has the images open: not all storage detects that
    #[arg(long, conflicts_with_all = ["check", "pin", "reload", "confine"])]
    pub(crate) take: bool,
}

#[derive(Subcommand)]
pub(crate) enum LibvirtCommand {
    /// Show the changes that would have Larder serve a domain's virtio disks, and with --apply make them
    Attach(LibvirtAttachArguments),
    /// Show the changes that would give the disks back to QEMU, and with --apply make them
    Detach(LibvirtDetachArguments),
    /// Start and stop Larder with a domain: called by libvirt's hook, with the domain's XML on standard input
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
    /// URI of the libvirt to use; by default the one that virsh chooses
    #[arg(long, short, value_name = "URI")]
    pub(crate) connect: Option<String>,
    /// Only this disk, by its target name in the domain (vda); may be given several times
    #[arg(long, value_name = "TARGET")]
    pub(crate) disk: Vec<String>,
    /// Serve also disks whose images refer to files that the domain's XML does not name
    #[arg(long)]
    pub(crate) trust_image: bool,
    /// Give each disk a cache in this directory, which is on a fast device
    #[arg(long, value_name = "DIR", requires = "cache_size")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Size of each of these caches
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
    /// URI of the libvirt to use; by default the one that virsh chooses
    #[arg(long, short, value_name = "URI")]
    pub(crate) connect: Option<String>,
}

#[derive(Args)]
pub(crate) struct LibvirtHookArguments {
    /// The domain's name
    #[arg(value_name = "NAME", allow_hyphen_values = true)]
    pub(crate) name: PathBuf,
    /// Operation that libvirt performs on the domain: prepare, release or reconnect; any other does nothing
    #[arg(value_name = "OPERATION", allow_hyphen_values = true)]
    pub(crate) operation: String,
    /// Phase of the operation: begin or end
    #[arg(value_name = "MOMENT", allow_hyphen_values = true)]
    pub(crate) moment: String,
    /// Ignored
    #[arg(value_name = "EXTRA", allow_hyphen_values = true)]
    pub(crate) extra: Vec<OsString>,
}

#[derive(Args)]
pub(crate) struct RunArguments {
    /// Add a disk: IMAGE[,KEY=VALUE]... with format=raw|qcow2, serial, readonly=on, share=on, cache=direct|buffered,
    /// discard=unmap|ignore, queues, queue-size, block-size, poll-us, metadata-memory, prefetch=SIZE|off,
    /// prefetch-ahead, prefetch-largest-read, cache=FILE with cache-size, cache-line, cache-mode, cache-endurance and
    /// cache-exclusive=on, control=PATH, nbd-reconnect, and limits such as iops=1000 or bps=100M; a comma in IMAGE is
    /// doubled
    #[arg(long, value_name = "IMAGE,...", value_parser = parse_disk)]
    pub(crate) disk: Vec<DiskSpec>,
    /// Keep the guest's memory within this budget of the host's memory, as larder memory attach does
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory_budget: Option<ByteLen>,
    /// Part of the budget for compressed pages; by default half, or a 16th with a swap cache or a slow store
    #[arg(long, value_name = "SIZE", requires = "memory_budget")]
    pub(crate) memory_compressed: Option<ByteLen>,
    /// Store for pages that do not fit into compressed RAM: a file (created if it does not exist, and removed at the
    /// end), a block device, or an NBD URI
    #[arg(long, value_name = "FILE", value_parser = image_parser(), requires = "memory_budget")]
    pub(crate) memory_swap_cache: Option<ImageAddress>,
    /// Maximum size of the swap cache; by default the whole file or device
    #[arg(long, value_name = "SIZE", requires = "memory_swap_cache")]
    pub(crate) memory_swap_size: Option<ByteLen>,
    /// Store for pages that do not fit into the swap cache: a file (created if it does not exist, and removed at the
    /// end), a block device, or an NBD URI
    #[arg(long, value_name = "FILE", value_parser = image_parser(), requires = "memory_budget")]
    pub(crate) memory_slow_store: Option<ImageAddress>,
    /// Maximum size of the slow store; by default the whole file or device
    #[arg(long, value_name = "SIZE", requires = "memory_slow_store")]
    pub(crate) memory_slow_size: Option<ByteLen>,
    /// Encrypt the pages in the swap cache and the slow store, with a key that is only in memory and ends with QEMU;
    /// on by default
    #[arg(long, value_name = "on|off", requires = "memory_budget")]
    pub(crate) memory_encrypt: Option<Switch>,
    /// As root, open the files that the headers of other users' images name
    #[arg(long)]
    pub(crate) trust_image: bool,
    /// Check the images and print the commands that would be started, ready to paste, and start nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print the commands that are started, and the messages of the disks' servers
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// QEMU's program and arguments
    #[arg(last = true, required = true, value_name = "QEMU COMMAND")]
    pub(crate) qemu: Vec<OsString>,
}

#[derive(Subcommand)]
// As for `Command`: one value, which is not moved.
#[allow(clippy::large_enum_variant)]
pub(crate) enum DiskCommand {
    /// Serve a disk image to a guest or to tools
    Serve(ServeArguments),
    /// Show information about an image, even one in use
    Info(InfoArguments),
    /// Check a qcow2 image's metadata, and repair it
    Check(CheckArguments),
    /// Show how the size of a qcow2 image's tables affects its speed
    Tune(ImageArguments),
    /// Make a disk larger, while no process uses it
    Resize(ResizeArguments),
    /// Manage a disk's cache
    #[command(subcommand)]
    Cache(CacheCommand),
}

#[derive(Subcommand)]
pub(crate) enum CacheCommand {
    /// Show which disk a cache belongs to and what it holds, even for one in use
    Info(CacheInfoArguments),
    /// Change how a cache handles writes
    Mode(CacheModeArguments),
    /// Write dirty data of a cache to its disk (write-back)
    Flush(CacheFlushArguments),
    /// Give a disk in use another cache, or its own cache that had failed, while the guest runs
    Replace(CacheReplaceArguments),
    /// Make the file of a cache larger or smaller with its contents, while no process uses it
    Resize(CacheResizeArguments),
    /// Remove the cache from its device, while no process uses it
    Drop(CacheDropArguments),
}

#[derive(Args)]
pub(crate) struct CacheInfoArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// Output format: for people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct CacheModeArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    #[arg(value_name = "MODE", value_parser = parse_cache_mode, help = cache_mode_help())]
    pub(crate) mode: CacheMode,
    /// The control socket of the server that uses the cache
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct CacheFlushArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// The control socket of the server that uses the cache
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Location of the cache's disk, if it was moved since the cache was last used
    #[arg(long, value_name = "IMAGE", value_parser = image_parser(), conflicts_with = "control")]
    pub(crate) image: Option<ImageAddress>,
    /// The format of the cache's disk, if the cache belongs to another user
    #[arg(long, requires = "image")]
    pub(crate) format: Option<FormatName>,
    /// As root, open the files that the header of another user's image names
    #[arg(long, conflicts_with = "control")]
    pub(crate) trust_image: bool,
    /// Flush even if the disk seems to have been changed without the cache, and overwrite those changes with the
    /// cache's data
    #[arg(long, conflicts_with = "control")]
    pub(crate) force: bool,
}

#[derive(Args)]
pub(crate) struct CacheReplaceArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// The control socket of the server that uses the cache
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// Location of the new cache: a file, which is created if it does not exist, a block device, or an NBD export; by
    /// default that of the old cache, whose device had failed and works again
    #[arg(long, value_name = "NEW", value_parser = image_parser())]
    pub(crate) with: Option<ImageAddress>,
    /// Size of the new file; by default that of the old cache
    #[arg(long, requires = "with")]
    pub(crate) size: Option<ByteLen>,
    /// Replace the old cache, which has failed, even if it has data that was never written to its disk
    #[arg(long, requires = "with")]
    pub(crate) lose_dirty: bool,
}

#[derive(Args)]
pub(crate) struct CacheResizeArguments {
    /// The file that the cache is in
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// The new size of the file
    pub(crate) size: ByteLen,
}

#[derive(Args)]
pub(crate) struct CacheDropArguments {
    /// The file, block device or NBD export that the cache is on
    #[arg(value_name = "FILE", value_parser = image_parser())]
    pub(crate) file: ImageAddress,
    /// Drop the cache even if it may have data that was never written to its disk
    #[arg(long)]
    pub(crate) lose_dirty: bool,
}

/// Arguments that the commands about one image have in common.
#[derive(Args)]
pub(crate) struct ImageArguments {
    /// A disk image, a block device, or an NBD URI
    #[arg(value_parser = image_parser())]
    pub(crate) image: ImageAddress,
    /// The image's format; by default it is detected from the first bytes
    #[arg(long)]
    pub(crate) format: Option<FormatName>,
    /// Output format: for people, or for programs, with the field names of qemu-img where it has them
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct InfoArguments {
    #[command(flatten)]
    pub(crate) of: ImageArguments,
    /// Also open the backing files that the headers name, and show information about them
    #[arg(long)]
    pub(crate) backing_chain: bool,
    /// As root, open also the backing files that the headers of other users' images name
    #[arg(long, requires = "backing_chain")]
    pub(crate) trust_image: bool,
}

#[derive(Args)]
pub(crate) struct CheckArguments {
    #[command(flatten)]
    pub(crate) of: ImageArguments,
    /// Repair errors; no other process may use the image at the same time
    #[arg(long, value_name = "WHAT", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    pub(crate) repair: Option<RepairName>,
    /// Discard the changes in a killed server's journal that the image lacks, even if the journal cannot be found;
    /// they are writes of the guest since its last flush
    #[arg(long)]
    pub(crate) discard_journal: bool,
    /// As root, open the files that the header of another user's image names
    #[arg(long)]
    pub(crate) trust_image: bool,
    /// Maximum memory for counting references
    #[arg(long, value_name = "SIZE", default_value_t = CHECK_MEMORY_DEFAULT)]
    pub(crate) memory: ByteLen,
}

#[derive(Args)]
pub(crate) struct ResizeArguments {
    #[command(flatten)]
    pub(crate) of: ImageArguments,
    /// The new size, or with a + the growth: 40G, +512M
    #[arg(value_name = "[+]SIZE", value_parser = parse_new_size, allow_hyphen_values = true)]
    pub(crate) size: NewSize,
    /// As root, open the files that the header of another user's image names
    #[arg(long)]
    pub(crate) trust_image: bool,
}

/// Requested size of a disk.
#[derive(Clone, Copy)]
pub(crate) enum NewSize {
    /// The new size itself.
    Absolute(ByteLen),
    /// Growth relative to the current size.
    Growth(ByteLen),
}

fn parse_new_size(text: &str) -> Result<NewSize, String> {
    let size = |text: &str| text.parse::<ByteLen>().map_err(|error| error.to_string());
    if text.strip_prefix('-').is_some_and(|less| size(less).is_ok()) {
        return Err("a disk is never made smaller: that would discard the data past its new end".to_owned());
    }
    match text.strip_prefix('+') {
        Some(more) => size(more).map(NewSize::Growth),
        None => size(text).map(NewSize::Absolute),
    }
}

/// Format of printed results.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Text for people
    Text,
    /// A JSON object
    Json,
}

/// Errors that a repair fixes.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RepairName {
    /// Leaked clusters only
    Leaks,
    /// All errors that can be repaired
    All,
}

/// Image formats that the command line names.
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

/// Other files that an image may have opened.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackingChain {
    /// Files that its header names, as QEMU does
    Follow,
    /// None: an image that names any is refused
    None,
}

/// Treatment of a guest's discards.
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
        Ok(_) => Err(format!("at most {POLL_US_MAX} microseconds (10 ms): a thread that spins keeps a processor busy")),
        Err(_) => Err(format!("not a whole number of microseconds from 0 to {POLL_US_MAX}")),
    }
}

fn parse_queue_size(text: &str) -> Result<u16, String> {
    let size = text.parse().ok().filter(|size: &u16| size.is_power_of_two());
    size.filter(|size| (QUEUE_SIZE_MIN..=QUEUE_SIZE_MAX).contains(size)).ok_or_else(|| {
        format!("give a power of two from {QUEUE_SIZE_MIN} to {QUEUE_SIZE_MAX}; virtqueues have no other size")
    })
}

/// Parses an image argument as an OS string, since a path need not be UTF-8.
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
    let default = PrefetchOptions::default().largest_read;
    format!(
        "Longest read that causes read-ahead; after longer ones the copy costs more than is gained [default: {default}]"
    )
}

fn prefetch_ahead_help() -> String {
    let default = PrefetchOptions::default().ahead_max;
    format!("Maximum read-ahead distance [default: {default}]")
}

fn cache_mode_help() -> String {
    let modes = CACHE_MODES.map(|mode| format!("{} ({})", cache_mode_name(mode), cache_mode_long_name(mode)));
    format!("Write policy of the cache: {}", modes.join(", "))
}

fn served_cache_mode_help() -> String {
    let default = cache_mode_name(CacheMode::default());
    format!("{} [default: the mode of an existing cache, or {default}]", cache_mode_help())
}

fn cache_line_help() -> String {
    format!("Size of the cache's lines, fixed when the cache is created, up to 64KiB [default: {CACHE_LINE_DEFAULT}]")
}

#[derive(Args)]
pub(crate) struct ServeArguments {
    /// A disk image, a block device, or an NBD URI
    #[arg(required_unless_present_any = ["blk_file", "print_capabilities"], conflicts_with = "blk_file",
          value_parser = image_parser())]
    pub(crate) image: Option<ImageAddress>,
    /// The image's format; by default it is detected from the first bytes
    #[arg(long)]
    pub(crate) format: Option<FormatName>,
    /// Other files that a qcow2 image may have opened: its backing files and its data file
    #[arg(long, value_name = "FILES", default_value = "follow")]
    pub(crate) backing_chain: BackingChain,
    /// If FILE does not exist, write the names of the image's other files into it; if it does, open those and no
    /// others
    #[arg(long, value_name = "FILE", conflicts_with = "backing_chain")]
    pub(crate) pin_chain: Option<PathBuf>,
    /// As root, open the files that the header of another user's image names
    #[arg(long)]
    pub(crate) trust_image: bool,
    /// Maximum size of a qcow2 image's metadata cache; by default as much as the disk needs, up to 256MiB
    #[arg(long, value_name = "SIZE", default_value_t = METADATA_MEMORY_DEFAULT)]
    pub(crate) metadata_memory: ByteLen,
    #[arg(long, value_name = "SIZE|off", help = prefetch_help())]
    pub(crate) prefetch: Option<PrefetchMemory>,
    #[arg(long, value_name = "SIZE", value_parser = parse_prefetch_len, help = prefetch_largest_read_help())]
    pub(crate) prefetch_largest_read: Option<ByteLen>,
    #[arg(long, value_name = "SIZE", value_parser = parse_prefetch_len, help = prefetch_ahead_help())]
    pub(crate) prefetch_ahead: Option<ByteLen>,
    /// Cache frequently used data on this file, block device or NBD export, which is faster than the image and serves
    /// no other image. A file that does not exist is created
    #[arg(long, value_name = "FILE", value_parser = image_parser())]
    pub(crate) cache: Option<ImageAddress>,
    /// Size of the cache's file when it is created
    #[arg(long, value_name = "SIZE")]
    pub(crate) cache_size: Option<ByteLen>,
    #[arg(long, value_name = "MODE", value_parser = parse_cache_mode, help = served_cache_mode_help())]
    pub(crate) cache_mode: Option<CacheMode>,
    #[arg(long, value_name = "SIZE", value_parser = parse_cache_line, help = cache_line_help())]
    pub(crate) cache_line: Option<ByteLen>,
    /// Maximum number of bytes per day that are written to the cache's device, to limit the wear of an SSD
    #[arg(long, value_name = "SIZE", value_parser = parse_cache_endurance)]
    pub(crate) cache_endurance: Option<ByteLen>,
    /// Declare that only this server writes to the disk, even while the server is not running: after a kill the cache
    /// is used without a comparison with the disk
    #[arg(long)]
    pub(crate) cache_exclusive: bool,
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
    /// Description of the NBD export, shown to clients that list exports
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true, requires = "nbd")]
    pub(crate) nbd_description: ExportDescription,
    /// Refuse writes
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Let other processes use the image at the same time, at your own risk
    #[arg(long)]
    pub(crate) share: bool,
    /// Use the host's page cache instead of direct I/O
    #[arg(long)]
    pub(crate) buffered: bool,
    /// Treatment of the guest's discards
    #[arg(long, value_name = "POLICY", default_value = "unmap")]
    pub(crate) discard: DiscardPolicy,
    /// Limits per second: KEY=VALUE,... with iops-total, iops-read, iops-write, bps-total, bps-read, bps-write, each
    /// also with -max and -max-length for bursts, and iops-size; QEMU's older names and libvirt's are accepted as
    /// well
    #[arg(long, value_name = "LIMITS", value_parser = parse_nonempty_limits)]
    pub(crate) throttle: Option<ThrottleLimits>,
    /// Number of virtqueues offered over vhost-user-blk
    #[arg(long, value_name = "N", default_value_t = QUEUES_MAX)]
    pub(crate) queues: u16,
    /// Descriptors that the front-end gives each virtqueue (QEMU's queue-size), a power of two from 4 to 1024: larger
    /// queues carry larger requests
    #[arg(long, value_name = "N", default_value_t = QUEUE_SIZE_DEFAULT, value_parser = parse_queue_size)]
    pub(crate) queue_size: u16,
    /// Serial number that the guest sees over vhost-user-blk, up to 20 bytes
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) serial: String,
    /// Sector size that the guest sees over vhost-user-blk, in bytes: 512 or 4096
    #[arg(long, value_name = "BYTES", default_value_t = 512)]
    pub(crate) block_size: u32,
    /// Poll up to this many microseconds for the next request before sleeping, 10000 at most; 0 sleeps at once
    #[arg(long, value_name = "US", default_value_t = POLL_MAX_DEFAULT.as_micros() as u64, value_parser = parse_poll_us)]
    pub(crate) poll_us: u64,
    /// Time that requests wait for a disconnected NBD server before they fail, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(..=RECONNECT_SECONDS_MAX))]
    pub(crate) nbd_reconnect: u64,
    /// Report the state of the disk on this unix socket: `larder status PATH`, or HTTP (GET /v1/disks)
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Write the process's PID to this file once the disk is served
    #[arg(long, value_name = "PATH")]
    pub(crate) pidfile: Option<PathBuf>,
    /// The image, under the name that vhost-user's conventions for back-ends give the option
    #[arg(long, value_name = "PATH", value_parser = image_parser())]
    pub(crate) blk_file: Option<ImageAddress>,
    /// Print the capabilities of this back-end as vhost-user's conventions require, and exit
    #[arg(long)]
    pub(crate) print_capabilities: bool,
    /// QEMU's locks on the image's files are held and checked by the process that starts this one (set by `larder
    /// run`)
    #[arg(long, hide = true)]
    pub(crate) inherit_locks: bool,
}

/// Extends an `InvalidUtf8` error with the argument that is not UTF-8 although it should be.
pub(crate) fn explain_non_utf8_argument(error: clap::Error) -> clap::Error {
    if error.kind() != ErrorKind::InvalidUtf8 {
        return error;
    }
    let suspects: Vec<String> = std::env::args_os()
        .filter(|argument| argument.to_str().is_none())
        .map(|argument| format!("'{}'", argument.to_string_lossy()))
        .collect();
    let message = match suspects.as_slice() {
        [one] => format!("{one} is not UTF-8; only paths need not be"),
        many => format!("one of {} should be UTF-8; only paths need not be", many.join(", ")),
    };
    Cli::command().error(ErrorKind::InvalidUtf8, message)
}

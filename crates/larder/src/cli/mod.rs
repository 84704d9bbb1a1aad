//! The command line.

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
use larder_block::filter::throttle::Limits;
use larder_block::nbd::{ExportDescription, NbdUri};
use larder_cache::Mode;
use larder_export::vhost_user::{QUEUE_SIZE_DEFAULT, QUEUE_SIZE_MAX, QUEUE_SIZE_MIN, QUEUES_MAX};
use larder_qcow2::check::CHECK_MEMORY_DEFAULT;
use larder_vm::disk::{POLL_US_MAX, RECONNECT_SECONDS_MAX};
use larder_vm::image::{
    CACHE_LINE_DEFAULT, CACHE_MODES, Format, ImageAddress, METADATA_MEMORY_DEFAULT, PrefetchMemory, PrefetchOptions,
    cache_mode_name, cache_mode_words, parse_cache_endurance, parse_cache_line, parse_cache_mode, parse_prefetch_len,
};
use larder_vm::limits::parse_given_limits;
use larder_vm::wish::DiskWish;
use larder_vm::wish::keys::parse_disk;

use self::bench::BenchCodecArguments;
use self::memory::{MemoryCommand, Switch};
use self::migrate::MigrateArguments;
use self::watch::{AdviseArguments, HostArguments, StatusArguments, TopArguments};

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
    /// Move a running virtual machine to another host, its memory compressed on the way
    Migrate(Box<MigrateArguments>),
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
    /// Open files for the confined server at the other end of the socket that is standard input
    #[command(hide = true)]
    Open(OpenArguments),
}

#[derive(Args)]
pub(crate) struct OpenArguments {
    /// The file of the server's virtual machine; without it, that of the service larder@NAME.service which the server is
    pub(crate) file: Option<PathBuf>,
}

#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// Replay traces of disk accesses through the policy of Larder's disk cache, and through others
    Policy(BenchPolicyArguments),
    /// Send pages of memory through each way to make them smaller that a migration has, and through the accelerators that
    /// are there: what it takes and what is left
    Codec(BenchCodecArguments),
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
    /// Add to the file what it does not say of its disks: the format that each image begins like, and the files that the
    /// images' headers name. Look at what is added: whoever made an image has chosen what its header names
    #[arg(long, conflicts_with = "check")]
    pub(crate) pin: bool,
    /// Have the server that runs for this virtual machine read the file again, and say what has changed, what is left
    /// as it was until the server is started again, and what could not be done
    #[arg(long, conflicts_with_all = ["check", "pin"])]
    pub(crate) reload: bool,
    /// Give up every right to open, start or look at anything of this host before an image or a guest's request is read: whoever
    /// takes the server over has its own disks and no more. A process beside it opens for it what the file names
    #[arg(long, conflicts_with_all = ["check", "pin", "reload"])]
    pub(crate) confine: bool,
    /// Have the files opened by the opener that listens on this socket (larder-open.socket), as a service that is a user of its own
    #[arg(long, value_name = "SOCKET", requires = "confine")]
    pub(crate) opener: Option<PathBuf>,
    /// Open no image before the virtual machine comes from another host (larder migrate), which has them open until then.
    /// Its QEMU, started with -incoming, can connect before
    #[arg(long, conflicts_with_all = ["check", "pin", "reload", "expect", "take"])]
    pub(crate) incoming: bool,
    /// Have the server that is started next, or runs while no guest does, wait so, as for a service; and end
    #[arg(long, conflicts_with_all = ["check", "pin", "reload", "confine", "take"])]
    pub(crate) expect: bool,
    /// Have the server open the images of a virtual machine that has gone to another host, or was to come from one, and end.
    /// Only if no other host has it: not all storage tells
    #[arg(long, conflicts_with_all = ["check", "pin", "reload", "confine"])]
    pub(crate) take: bool,
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
    /// Also have disks served whose images lead to files that the domain's XML does not name
    #[arg(long)]
    pub(crate) trust_image: bool,
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

#[derive(Args)]
pub(crate) struct RunArguments {
    /// One more disk: IMAGE[,KEY=VALUE]... with format=raw|qcow2, serial, readonly=on, share=on,
    /// cache=direct|buffered, discard=unmap|ignore, queues, queue-size, block-size, poll-us, metadata-memory,
    /// prefetch=SIZE|off, prefetch-ahead, prefetch-largest-read, cache=FILE with cache-size, cache-line, cache-mode,
    /// cache-endurance and cache-exclusive=on, control=PATH, nbd-reconnect, and limits such as iops=1000 or bps=100M; a comma in IMAGE is
    /// doubled
    #[arg(long, value_name = "IMAGE,...", value_parser = parse_disk)]
    pub(crate) disk: Vec<DiskWish>,
    /// Keep the guest's memory within so much of the host's, as larder memory attach does
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory_budget: Option<ByteLen>,
    /// How much of the budget may be compressed pages; by default half, or a 16th with a swap cache or a slow store
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
    /// QEMU; on by default
    #[arg(long, value_name = "on|off", requires = "memory_budget")]
    pub(crate) memory_encrypt: Option<Switch>,
    /// As root, open the files that the headers of other users' images name
    #[arg(long)]
    pub(crate) trust_image: bool,
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
    Info(InfoArguments),
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
    /// The format of its disk, if the cache belongs to another user
    #[arg(long, requires = "image")]
    pub(crate) format: Option<FormatName>,
    /// As root, open the files that the header of another user's image names
    #[arg(long, conflicts_with = "control")]
    pub(crate) trust_image: bool,
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
pub(crate) struct InfoArguments {
    #[command(flatten)]
    pub(crate) of: ImageArguments,
    /// Open the backing files that the headers name, too, and say what they are
    #[arg(long)]
    pub(crate) backing_chain: bool,
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
    /// As root, open the files that the header of another user's image names
    #[arg(long)]
    pub(crate) trust_image: bool,
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
    /// As root, open the files that the header of another user's image names
    #[arg(long)]
    pub(crate) trust_image: bool,
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

/// The files that an image may lead to.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackingChain {
    /// Those that its header names, as QEMU does
    Follow,
    /// None: an image that names any is refused
    None,
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
    /// Which other files a qcow2 image may have opened: its backing files and its data file
    #[arg(long, value_name = "FILES", default_value = "follow")]
    pub(crate) backing_chain: BackingChain,
    /// Write which files the image leads to into FILE, if that is not there; if it is, open those and no others
    #[arg(long, value_name = "FILE", conflicts_with = "backing_chain")]
    pub(crate) pin_chain: Option<PathBuf>,
    /// As root, open the files that the header of another user's image names
    #[arg(long)]
    pub(crate) trust_image: bool,
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
    /// Nothing but this server writes to the disk, also while it is away: after a kill the cache is used without a comparison
    /// with the disk
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
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true,
        requires = "nbd"
    )]
    pub(crate) nbd_description: ExportDescription,
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

//! Options of `larder migrate`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::OsStringValueParser;
use clap::{Args, Subcommand, ValueEnum};
use larder_block::{ByteLen, SizeError};
use larder_migrate::tls::Peer;

use super::Output;
use super::address::Address;

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct MigrateArguments {
    #[command(subcommand)]
    pub(crate) command: Option<MigrateCommand>,
    #[command(flatten)]
    pub(crate) whole: MoveArguments,
}

/// The whole move.
#[derive(Args)]
pub(crate) struct MoveArguments {
    /// The virtual machine, whose file says how QEMU is found: qmp in its [memory]; or with a / in it the path of a file
    #[arg(value_name = "VM", required_unless_present = "qmp", conflicts_with = "qmp")]
    pub(crate) vm: Option<PathBuf>,
    /// The QMP socket of the QEMU that has the virtual machine
    #[arg(long, value_name = "PATH")]
    pub(crate) qmp: Option<PathBuf>,
    /// The host where larder migrate receive --qmp waits
    #[arg(long, value_name = "HOST[:PORT]", required_unless_present = "take_back", value_parser = Address::to)]
    pub(crate) to: Option<Address>,
    /// Let a virtual machine that was handed over run here again. Only if the QEMU at the destination has ended and will not
    /// run it: nobody asks there
    #[arg(long, conflicts_with_all = ["to", "tls", "peer", "insecure", "postcopy", "keep", "timeout", "control"])]
    pub(crate) take_back: bool,
    #[command(flatten)]
    pub(crate) trust: TrustArguments,
    #[command(flatten)]
    pub(crate) sending: SendingArguments,
    /// QEMU's channels for pages besides its main channel (multifd-channels); 0 for none. One channel gives some 0.8 GB of
    /// memory in a second. With --postcopy there are none, since QEMU cannot do both
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=64))]
    pub(crate) channels: u8,
    /// How long the guest may stand still in the end, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=2_000_000))]
    pub(crate) downtime: u64,
    /// Give up after so many seconds; the virtual machine goes on here then
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) timeout: Option<u64>,
    /// If it would not end otherwise, let the guest run at the destination before all of its memory is there. Should the
    /// link or a host fail meanwhile, the guest waits for it to come back
    #[arg(long)]
    pub(crate) postcopy: bool,
    /// Let QEMU slow the guest down, more and more, if it would not end otherwise (auto-converge)
    #[arg(long)]
    pub(crate) throttle: bool,
    /// Do not end the QEMU here once the virtual machine runs at the destination
    #[arg(long)]
    pub(crate) keep: bool,
    /// Where to listen for larder migrate status, limit and cancel; by default where they, larder status and larder host
    /// look: VM.leaving.sock and VM.coming.sock in /run/larder-moves, or in larder/moves in $XDG_RUNTIME_DIR
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

/// What a sender may use.
#[derive(Args)]
pub(crate) struct SendingArguments {
    /// Connections between the hosts, and threads that compress, at most; by default as many as there are CPUs, up to 4
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) lanes: Option<u16>,
    /// Memory for old versions of pages, on each of the hosts, at most; by default an 8th of what is available, up to 4 GiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) delta_memory: Option<ByteLen>,
    /// Send no more than so many bytes in a second
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    pub(crate) bandwidth: Option<ByteLen>,
    /// When the connection to the other host is lost, try to make it again for so many seconds, and go on; at 0 a loss ends
    /// the move at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) patience: u64,
    /// Take no more of the processors' time for compressing and sending: 1.5 is one and a half processors, on an average
    #[arg(long, value_name = "PROCESSORS", value_parser = parse_cpu, allow_negative_numbers = true)]
    pub(crate) cpu: Option<f64>,
    /// Devices that compress beside the CPUs (Intel QuickAssist, In-Memory Analytics Accelerator), where their libraries are
    /// installed
    #[arg(long, value_name = "WHICH", default_value = "devices")]
    pub(crate) accelerators: AcceleratorsArgument,
}

/// Which devices compress.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum AcceleratorsArgument {
    /// Those that are there
    Devices,
    /// None
    None,
    /// Their libraries without them, to try those out: it is slower than without
    Software,
}

/// A size with its unit: of a number alone nobody knows whether MiB were meant, and it would take years.
fn parse_rate(text: &str) -> Result<ByteLen, String> {
    let rate: ByteLen = text.parse().map_err(|error: SizeError| error.to_string())?;
    if rate.is_zero() {
        return Err("nothing would go over; for no limit leave it out".to_owned());
    }
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("'{text}' has no unit: give {text}MiB, {text}KiB or {text}B"));
    }
    Ok(rate)
}

/// The same, or 0 for no limit.
fn parse_rate_or_none(text: &str) -> Result<ByteLen, String> {
    match text {
        "0" => Ok(ByteLen::new(0)),
        text => parse_rate(text).map_err(|error| format!("{error}, or 0 for no limit")),
    }
}

/// 0.01 to 1024.
fn parse_cpu(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(cpu) if (0.01..=1024.0).contains(&cpu) => Ok(cpu),
        _ => Err("give processors from 0.01 to 1024, as in 1.5".to_owned()),
    }
}

/// The same, or 0 for no limit.
fn parse_cpu_or_none(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(cpu) if cpu == 0.0 => Ok(cpu),
        _ => parse_cpu(text).map_err(|error| format!("{error}, or 0 for no limit")),
    }
}

#[derive(Subcommand)]
pub(crate) enum MigrateCommand {
    /// Carry the migration of a QEMU to a receiver on another host, compressed, and nothing else: QEMU migrates to unix:PATH,
    /// and whoever had it do so looks after both QEMUs
    Send(MigrateSendArguments),
    /// Take in a virtual machine, or what a sender carries, and hand it to the QEMU that waits
    Receive(MigrateReceiveArguments),
    /// Say how a move goes that is under way on this host
    Status(MigrateStatusArguments),
    /// Change what a move may take while it goes on; 0 takes a limit away
    Limit(MigrateLimitArguments),
    /// Cancel a move: the virtual machine goes on where it is, as after SIGINT
    Cancel(MigrateCancelArguments),
}

/// Which move.
#[derive(Args)]
pub(crate) struct MigrateAtArguments {
    /// The virtual machine's name; one that was named by --qmp PATH, --listen PATH or --connect PATH is called as the last
    /// part of that, without its extension. Or with a / in it the path of a control socket
    #[arg(value_name = "VM", value_parser = OsStringValueParser::new())]
    pub(crate) vm: OsString,
}

#[derive(Args)]
pub(crate) struct MigrateStatusArguments {
    #[command(flatten)]
    pub(crate) at: MigrateAtArguments,
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
#[group(id = "limits", required = true, multiple = true, args = ["bandwidth", "cpu", "downtime", "timeout"])]
pub(crate) struct MigrateLimitArguments {
    #[command(flatten)]
    pub(crate) at: MigrateAtArguments,
    /// Bytes on the link in a second
    #[arg(long, value_name = "SIZE", value_parser = parse_rate_or_none)]
    pub(crate) bandwidth: Option<ByteLen>,
    /// Processors' time for compressing and sending
    #[arg(long, value_name = "PROCESSORS", value_parser = parse_cpu_or_none, allow_negative_numbers = true)]
    pub(crate) cpu: Option<f64>,
    /// How long the guest may stand still in the end, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u64).range(1..=2_000_000))]
    pub(crate) downtime: Option<u64>,
    /// Seconds from its beginning after which it is given up
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<u64>,
}

#[derive(Args)]
pub(crate) struct MigrateCancelArguments {
    #[command(flatten)]
    pub(crate) at: MigrateAtArguments,
}

/// How the hosts trust one another.
#[derive(Args)]
pub(crate) struct TrustArguments {
    /// Encrypt, by TLS 1.3, and show and ask for certificates: the folder with ca-cert.pem, with client-cert.pem and
    /// client-key.pem of a sender, with server-cert.pem and server-key.pem of a receiver
    #[arg(long, value_name = "DIR")]
    pub(crate) tls: Option<PathBuf>,
    /// Accept only a host whose certificate has this SHA-256 fingerprint (of its public key, or of all of it), or is for this
    /// name or address; may be given several times. Without it a host is remembered by the public key that it shows first
    /// (in /var/lib/larder-migrate, of other users ~/.local/state/larder/migrate), and another key is refused later. A host
    /// that is accepted by its fingerprint is remembered, too, in the place of what was remembered of it
    #[arg(long, value_name = "FINGERPRINT|NAME", requires = "tls")]
    pub(crate) peer: Vec<Peer>,
    /// Let the guest's memory go over the network in the clear, to whoever answers there
    #[arg(long, conflicts_with = "tls")]
    pub(crate) insecure: bool,
}

#[derive(Args)]
pub(crate) struct MigrateSendArguments {
    /// Where QEMU migrates to: its migrate command gets unix:PATH
    #[arg(long, value_name = "PATH")]
    pub(crate) listen: PathBuf,
    /// Where larder migrate receive listens
    #[arg(long, value_name = "HOST[:PORT]", value_parser = Address::to)]
    pub(crate) to: Address,
    #[command(flatten)]
    pub(crate) trust: TrustArguments,
    #[command(flatten)]
    pub(crate) sending: SendingArguments,
    /// Where to listen for larder migrate status, limit and cancel; by default where they, larder status and larder host
    /// look: VM.leaving.sock and VM.coming.sock in /run/larder-moves, or in larder/moves in $XDG_RUNTIME_DIR
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct MigrateReceiveArguments {
    /// Where to wait for a sender
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = Address::at)]
    pub(crate) listen: Address,
    /// The QMP socket of a QEMU that was started with -incoming defer, and with what else the source's has: what
    /// larder migrate VM sends runs in it
    #[arg(long, value_name = "PATH", required_unless_present = "connect")]
    pub(crate) qmp: Option<PathBuf>,
    /// What QEMU was given with -incoming unix:PATH, to carry and do nothing else
    #[arg(long, value_name = "PATH", conflicts_with = "qmp")]
    pub(crate) connect: Option<PathBuf>,
    /// With --connect: the user that QEMU runs as, by name or number. Once the port is open and the keys are read, this
    /// process gives up root and is that user's; its control socket is where his are. Nobody else may listen at PATH
    #[arg(long, value_name = "USER", conflicts_with = "qmp")]
    pub(crate) user: Option<String>,
    #[command(flatten)]
    pub(crate) trust: TrustArguments,
    /// Connections and threads that decompress, at most
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) lanes: u16,
    /// Channels of QEMU's, at most: one, and its multifd-channels
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) channels: u16,
    /// Memory for old versions of pages, at most; by default an 8th of what is available, up to 4 GiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) delta_memory: Option<ByteLen>,
    /// Where to listen for larder migrate status, limit and cancel; by default where they, larder status and larder host
    /// look: VM.leaving.sock and VM.coming.sock in /run/larder-moves, or in larder/moves in $XDG_RUNTIME_DIR
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

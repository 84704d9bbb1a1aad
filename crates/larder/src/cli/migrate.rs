//! Options of `larder migrate`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::OsStringValueParser;
use clap::{Args, Subcommand, ValueEnum};
use larder_block::{ByteLen, SizeError};
use larder_migrate::tls::AllowedPeer;

use super::Output;
use super::address::ReceiverAddress;

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct MigrateArguments {
    #[command(subcommand)]
    pub(crate) command: Option<MigrateCommand>,
    #[command(flatten)]
    pub(crate) whole: MoveArguments,
}

/// Arguments of a complete move.
#[derive(Args)]
pub(crate) struct MoveArguments {
    /// The virtual machine, whose file names QEMU's socket (qmp in [memory]); or, with a / in it, the path of such a
    /// file
    #[arg(value_name = "VM", required_unless_present = "qmp", conflicts_with = "qmp")]
    pub(crate) vm: Option<PathBuf>,
    /// The QMP socket of the QEMU that runs the virtual machine
    #[arg(long, value_name = "PATH")]
    pub(crate) qmp: Option<PathBuf>,
    /// The host where larder migrate receive --qmp waits
    #[arg(long, value_name = "HOST[:PORT]", required_unless_present = "take_back", value_parser = ReceiverAddress::parse_receiver)]
    pub(crate) to: Option<ReceiverAddress>,
    /// Let a virtual machine that was handed over run here again. Use it only if the QEMU at the destination has
    /// ended and will not run the virtual machine: the destination is not asked
    #[arg(long, conflicts_with_all = ["to", "tls", "peer", "insecure", "postcopy", "keep", "timeout", "control"])]
    pub(crate) take_back: bool,
    #[command(flatten)]
    pub(crate) trust: TrustArguments,
    #[command(flatten)]
    pub(crate) sending: SendLimitArguments,
    /// QEMU's channels for pages in addition to its main channel (multifd-channels); 0 for none. One channel carries
    /// some 0.8 GB of memory per second. With --postcopy there are none, since QEMU cannot combine them
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=64))]
    pub(crate) channels: u8,
    /// Maximum downtime of the guest at the end of the move, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=2_000_000))]
    pub(crate) downtime: u64,
    /// Abort the move after this many seconds; the virtual machine then continues to run here
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) timeout: Option<u64>,
    /// If the move would not converge, let the guest run at the destination before all of its memory is there. If the
    /// link or a host fails in this phase, the guest waits until it is back
    #[arg(long)]
    pub(crate) postcopy: bool,
    /// Let QEMU slow the guest down step by step if the move would not converge (auto-converge)
    #[arg(long)]
    pub(crate) throttle: bool,
    /// Keep the QEMU here after the virtual machine runs at the destination
    #[arg(long)]
    pub(crate) keep: bool,
    /// Unix socket on which to serve larder migrate status, limit and cancel; by default where these commands, larder
    /// status and larder host look: VM.leaving.sock and VM.coming.sock in /run/larder-moves, or in larder/moves in
    /// $XDG_RUNTIME_DIR
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Output format: for people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

/// Resources that a sender may use.
#[derive(Args)]
pub(crate) struct SendLimitArguments {
    /// Maximum number of connections between the hosts, and of compression threads; by default the number of CPUs, up
    /// to 4
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) lanes: Option<u16>,
    /// Maximum memory for old versions of pages, on each of the hosts; by default an 8th of the available memory, up
    /// to 4 GiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) delta_memory: Option<ByteLen>,
    /// Maximum number of bytes sent per second
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    pub(crate) bandwidth: Option<ByteLen>,
    /// After the connection to the other host is lost, try for this many seconds to reconnect and resume; at 0 a loss
    /// ends the move at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) patience: u64,
    /// Maximum CPU time for compressing and sending, as an average number of processors: 1.5 is one and a half
    /// processors
    #[arg(long, value_name = "PROCESSORS", value_parser = parse_cpu, allow_negative_numbers = true)]
    pub(crate) cpu: Option<f64>,
    /// Devices that compress in addition to the CPUs (Intel QuickAssist, In-Memory Analytics Accelerator), where
    /// their libraries are installed
    #[arg(long, value_name = "WHICH", default_value = "devices")]
    pub(crate) accelerators: AcceleratorsArgument,
}

/// The devices that compress.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum AcceleratorsArgument {
    /// Devices that are present
    Devices,
    /// No devices
    None,
    /// The devices' libraries without the devices, for tests: slower than without
    Software,
}

/// Parses a rate with its unit. A bare number is rejected: if MiB were meant, a limit in bytes would make the move
/// take years.
fn parse_rate(text: &str) -> Result<ByteLen, String> {
    let rate: ByteLen = text.parse().map_err(|error: SizeError| error.to_string())?;
    if rate.is_zero() {
        return Err("nothing would be sent; omit the option for no limit".to_owned());
    }
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("'{text}' has no unit: give {text}MiB, {text}KiB or {text}B"));
    }
    Ok(rate)
}

/// Parses a rate with its unit, or 0 for no limit.
fn parse_rate_or_none(text: &str) -> Result<ByteLen, String> {
    match text {
        "0" => Ok(ByteLen::new(0)),
        text => parse_rate(text).map_err(|error| format!("{error}, or 0 for no limit")),
    }
}

/// Parses a number of processors, from 0.01 to 1024.
fn parse_cpu(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(cpu) if (0.01..=1024.0).contains(&cpu) => Ok(cpu),
        _ => Err("give processors from 0.01 to 1024, as in 1.5".to_owned()),
    }
}

/// Parses a number of processors, from 0.01 to 1024, or 0 for no limit.
fn parse_cpu_or_none(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(cpu) if cpu == 0.0 => Ok(cpu),
        _ => parse_cpu(text).map_err(|error| format!("{error}, or 0 for no limit")),
    }
}

#[derive(Subcommand)]
pub(crate) enum MigrateCommand {
    /// Only carry the migration of a QEMU to a receiver on another host, compressed: QEMU migrates to unix:PATH, and
    /// the program that started the migration manages both QEMUs
    Send(MigrateSendArguments),
    /// Receive a virtual machine, or the stream of a sender, and hand it to the waiting QEMU
    Receive(MigrateReceiveArguments),
    /// Show the progress of a move on this host
    Status(MigrateStatusArguments),
    /// Change the limits of a running move; 0 removes a limit
    Limit(MigrateLimitArguments),
    /// Cancel a move: the virtual machine continues to run where it is, as after SIGINT
    Cancel(MigrateCancelArguments),
}

/// Selects a move.
#[derive(Args)]
pub(crate) struct MigrateTargetArguments {
    /// The virtual machine's name; if the move was started with --qmp PATH, --listen PATH or --connect PATH, the last
    /// part of PATH without its extension. Or, with a / in it, the path of a control socket
    #[arg(value_name = "VM", value_parser = OsStringValueParser::new())]
    pub(crate) vm: OsString,
}

#[derive(Args)]
pub(crate) struct MigrateStatusArguments {
    #[command(flatten)]
    pub(crate) at: MigrateTargetArguments,
    /// Output format: for people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
#[group(id = "limits", required = true, multiple = true, args = ["bandwidth", "cpu", "downtime", "timeout"])]
pub(crate) struct MigrateLimitArguments {
    #[command(flatten)]
    pub(crate) at: MigrateTargetArguments,
    /// Maximum number of bytes on the link per second
    #[arg(long, value_name = "SIZE", value_parser = parse_rate_or_none)]
    pub(crate) bandwidth: Option<ByteLen>,
    /// Maximum CPU time for compressing and sending, as a number of processors
    #[arg(long, value_name = "PROCESSORS", value_parser = parse_cpu_or_none, allow_negative_numbers = true)]
    pub(crate) cpu: Option<f64>,
    /// Maximum downtime of the guest at the end of the move, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u64).range(1..=2_000_000))]
    pub(crate) downtime: Option<u64>,
    /// Seconds after its start at which the move is aborted
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<u64>,
}

#[derive(Args)]
pub(crate) struct MigrateCancelArguments {
    #[command(flatten)]
    pub(crate) at: MigrateTargetArguments,
}

/// Options for encryption and mutual authentication of the hosts.
#[derive(Args)]
pub(crate) struct TrustArguments {
    /// Encrypt with TLS 1.3, and authenticate both sides by certificates: the directory with ca-cert.pem, and for a
    /// sender client-cert.pem and client-key.pem, for a receiver server-cert.pem and server-key.pem
    #[arg(long, value_name = "DIR")]
    pub(crate) tls: Option<PathBuf>,
    /// Accept only a host whose certificate has this SHA-256 fingerprint (of its public key, or of the whole
    /// certificate), or is for this name or address; may be given several times. Without it, the public key that a
    /// host shows first is remembered (in /var/lib/larder-migrate, for users other than root
    /// ~/.local/state/larder/migrate), and another key is refused later. A host that is accepted by its fingerprint
    /// is remembered as well, in place of its earlier key
    #[arg(long, value_name = "FINGERPRINT|NAME", requires = "tls")]
    pub(crate) peer: Vec<AllowedPeer>,
    /// Send the guest's memory over the network unencrypted, to any host that answers at the address
    #[arg(long, conflicts_with = "tls")]
    pub(crate) insecure: bool,
}

#[derive(Args)]
pub(crate) struct MigrateSendArguments {
    /// Unix socket to which QEMU migrates: its migrate command gets unix:PATH
    #[arg(long, value_name = "PATH")]
    pub(crate) listen: PathBuf,
    /// The address where larder migrate receive listens
    #[arg(long, value_name = "HOST[:PORT]", value_parser = ReceiverAddress::parse_receiver)]
    pub(crate) to: ReceiverAddress,
    #[command(flatten)]
    pub(crate) trust: TrustArguments,
    #[command(flatten)]
    pub(crate) sending: SendLimitArguments,
    /// Unix socket on which to serve larder migrate status, limit and cancel; by default where these commands, larder
    /// status and larder host look: VM.leaving.sock and VM.coming.sock in /run/larder-moves, or in larder/moves in
    /// $XDG_RUNTIME_DIR
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Output format: for people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct MigrateReceiveArguments {
    /// Address on which to wait for a sender
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = ReceiverAddress::parse_listen)]
    pub(crate) listen: ReceiverAddress,
    /// The QMP socket of a QEMU that was started with -incoming defer, and otherwise with the options of the source's
    /// QEMU: the virtual machine that larder migrate VM sends will run in it
    #[arg(long, value_name = "PATH", required_unless_present = "connect")]
    pub(crate) qmp: Option<PathBuf>,
    /// The PATH that QEMU got with -incoming unix:PATH, to carry the stream and do nothing else
    #[arg(long, value_name = "PATH", conflicts_with = "qmp")]
    pub(crate) connect: Option<PathBuf>,
    /// With --connect: the user that QEMU runs as, by name or number. Once the port is open and the keys are read,
    /// this process switches from root to that user, and places its control socket where that user's are. No other
    /// user may listen at PATH
    #[arg(long, value_name = "USER", conflicts_with = "qmp")]
    pub(crate) user: Option<String>,
    #[command(flatten)]
    pub(crate) trust: TrustArguments,
    /// Maximum number of connections, and of threads that decompress
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) lanes: u16,
    /// Maximum number of QEMU's channels: the main channel and its multifd-channels
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) channels: u16,
    /// Maximum memory for old versions of pages; by default an 8th of the available memory, up to 4 GiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) delta_memory: Option<ByteLen>,
    /// Unix socket on which to serve larder migrate status, limit and cancel; by default where these commands, larder
    /// status and larder host look: VM.leaving.sock and VM.coming.sock in /run/larder-moves, or in larder/moves in
    /// $XDG_RUNTIME_DIR
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Output format: for people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

//! Options of `larder migrate`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use larder_block::ByteLen;
use larder_migrate::tls::Pin;

use super::Output;

#[derive(Subcommand)]
pub(crate) enum MigrateCommand {
    /// Carry the migration of a QEMU to a receiver on another host, compressed: it migrates to unix:PATH
    Send(MigrateSendArguments),
    /// Take in what a sender carries, and hand it to the QEMU that waits with -incoming unix:PATH
    Receive(MigrateReceiveArguments),
}

/// How the hosts trust one another.
#[derive(Args)]
pub(crate) struct TrustArguments {
    /// Encrypt, by TLS 1.3, and show and ask for certificates: the folder with ca-cert.pem, with client-cert.pem and
    /// client-key.pem of a sender, with server-cert.pem and server-key.pem of a receiver
    #[arg(long, value_name = "DIR")]
    pub(crate) tls: Option<PathBuf>,
    /// Take only a peer whose certificate has this SHA-256 fingerprint; may be given several times
    #[arg(long, value_name = "FINGERPRINT", requires = "tls")]
    pub(crate) peer: Vec<Pin>,
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
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) to: String,
    #[command(flatten)]
    pub(crate) trust: TrustArguments,
    /// Connections between the hosts, and threads that compress, at most; by default as many as there are CPUs, up to 4
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) lanes: Option<u16>,
    /// Memory for old versions of pages, on each of the hosts, at most; by default an 8th of what is available, up to 4 GiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) delta_memory: Option<ByteLen>,
    /// Send no more than so many bytes in a second
    #[arg(long, value_name = "SIZE")]
    pub(crate) bandwidth: Option<ByteLen>,
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct MigrateReceiveArguments {
    /// Where to wait for a sender
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: String,
    /// Where QEMU waits: what it was given with -incoming unix:PATH
    #[arg(long, value_name = "PATH")]
    pub(crate) connect: PathBuf,
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
    /// For people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

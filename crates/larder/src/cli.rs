//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Keeps what a QEMU virtual machine needs next close at hand.
#[derive(Parser)]
#[command(version, about, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Serve and inspect disks
    #[command(subcommand)]
    Disk(DiskCommand),
}

#[derive(Subcommand)]
pub(crate) enum DiskCommand {
    /// Serve a disk image to a guest or to tools
    Serve(ServeArguments),
}

#[derive(Args)]
pub(crate) struct ServeArguments {
    /// A disk image, a block device, or an NBD URI
    pub(crate) image: PathBuf,
    /// Serve vhost-user-blk on this unix socket
    #[arg(long, visible_alias = "socket-path", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Refuse changes
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Let other processes use the image at the same time; you answer for what that does
    #[arg(long)]
    pub(crate) share: bool,
    /// Go through the host's page cache instead of direct I/O
    #[arg(long)]
    pub(crate) buffered: bool,
    /// Virtqueues offered
    #[arg(long, value_name = "N", default_value_t = larder_export::vhost_user::QUEUES_MAX)]
    pub(crate) queues: u16,
    /// Serial number that the guest sees, up to 20 bytes
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) serial: String,
    /// Spin up to this many microseconds for the next request before sleeping
    #[arg(long, value_name = "US", default_value_t = 50)]
    pub(crate) poll_us: u64,
}

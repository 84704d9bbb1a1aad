//! The experiments: each subcommand measures one thing and prints a table.

mod vhost_user;

use clap::{Parser, Subcommand};

/// The experiments that Larder's figures come from.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    VhostUser(vhost_user::Arguments),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::VhostUser(arguments) => vhost_user::run(&arguments),
    }
}

//! The experiments: each subcommand measures one thing and prints a table.

mod vhost_user;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use larder_bench::simulate;

/// The experiments that Larder's figures come from.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Simulate(simulate::Arguments),
    VhostUser(vhost_user::Arguments),
}

fn main() -> anyhow::Result<ExitCode> {
    let passed = match Cli::parse().command {
        Command::Simulate(arguments) => simulate::run(&arguments)?,
        Command::VhostUser(arguments) => {
            vhost_user::run(&arguments)?;
            true
        }
    };
    Ok(match passed {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

//! The experiments: each subcommand measures one thing and prints a table.

mod vhost_user;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use larder_bench::{campaign, simulate};

/// The experiments that Larder's figures come from.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Kill(campaign::Arguments),
    Simulate(simulate::Arguments),
    VhostUser(vhost_user::Arguments),
}

fn main() -> anyhow::Result<ExitCode> {
    let passed = match Cli::parse().command {
        Command::Kill(arguments) => {
            campaign::run(&arguments)?;
            true
        }
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

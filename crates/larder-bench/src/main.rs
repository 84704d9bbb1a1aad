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
    /// Every experiment that `docs/benchmarks.md` has a table of
    All,
    Kill(campaign::Arguments),
    Simulate(simulate::Arguments),
    VhostUser(vhost_user::Arguments),
}

/// What `all` runs, as one would type it.
const ALL: [&[&str]; 3] = [
    &["larder-bench", "vhost-user"],
    &["larder-bench", "vhost-user", "--event-client"],
    &[
        "larder-bench",
        "vhost-user",
        "--blocks",
        "131072,1048576",
        "--depths",
        "1,8",
    ],
];

fn main() -> anyhow::Result<ExitCode> {
    let passed = match Cli::parse().command {
        Command::All => {
            for words in ALL {
                println!("{}", words.join(" "));
                if let Command::VhostUser(arguments) = Cli::parse_from(words).command {
                    vhost_user::run(&arguments)?;
                }
                println!();
            }
            true
        }
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

//! The experiments: each subcommand measures one thing and prints a table.

mod cache;
mod discard;
mod figures;
mod hostile_guest;
mod memory;
mod migrate;
mod prefetch;
mod qcow2;
mod select;
mod undo;
mod vhost_user;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use larder_bench::{campaign, fuzz_disks, hostile_images, simulate, space};

/// Experiments that produce the numbers in Larder's documentation
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the experiments that have a table in `docs/benchmarks.md`
    All,
    ActMemory(memory::act::Arguments),
    Cache(cache::Arguments),
    Discard(discard::Arguments),
    ForeignWrites(campaign::foreign::Arguments),
    FuzzDisks(fuzz_disks::Arguments),
    HostileGuest(hostile_guest::Arguments),
    HostileImages(hostile_images::Arguments),
    Kill(campaign::Arguments),
    Restart(campaign::restarts::Arguments),
    Memory(memory::Arguments),
    MemoryAttach(campaign::memory_attach::Arguments),
    MemoryGuests(campaign::memory_guests::Arguments),
    MemoryKills(campaign::memory_kills::Arguments),
    Migrate(migrate::Arguments),
    MigrateKills(campaign::migrate_kills::Arguments),
    Prefetch(prefetch::Arguments),
    Qcow2(qcow2::Arguments),
    Select(select::Arguments),
    Simulate(simulate::Arguments),
    Space(space::Arguments),
    TouchMemory(memory::touch::Arguments),
    VerifyMemory(campaign::verifier::Arguments),
    VhostUser(vhost_user::Arguments),
}

/// Command lines that `all` runs.
const ALL: [&[&str]; 6] = [
    &["larder-bench", "vhost-user"],
    &["larder-bench", "vhost-user", "--event-client"],
    &["larder-bench", "vhost-user", "--blocks", "131072,1048576", "--depths", "1,8"],
    &["larder-bench", "qcow2"],
    &["larder-bench", "prefetch"],
    &["larder-bench", "cache"],
];

fn main() -> anyhow::Result<ExitCode> {
    let passed = match Cli::parse().command {
        Command::All => {
            for command in ALL {
                println!("{}", command.join(" "));
                match Cli::parse_from(command).command {
                    Command::VhostUser(arguments) => vhost_user::run(&arguments)?,
                    Command::Qcow2(arguments) => qcow2::run(&arguments)?,
                    Command::Prefetch(arguments) => prefetch::run(&arguments)?,
                    Command::Cache(arguments) => cache::run(&arguments)?,
                    _ => {}
                }
                println!();
            }
            true
        }
        Command::ActMemory(arguments) => {
            memory::act::main(&arguments)?;
            true
        }
        Command::Cache(arguments) => {
            cache::run(&arguments)?;
            true
        }
        Command::Discard(arguments) => {
            discard::run(&arguments)?;
            true
        }
        Command::ForeignWrites(arguments) => campaign::foreign::main(&arguments)?,
        Command::FuzzDisks(arguments) => fuzz_disks::run(&arguments)?,
        Command::Kill(arguments) => {
            campaign::run(&arguments)?;
            true
        }
        Command::Memory(arguments) => {
            memory::run(&arguments)?;
            true
        }
        Command::MemoryAttach(arguments) => {
            campaign::memory_attach::main(&arguments)?;
            true
        }
        Command::MemoryGuests(arguments) => {
            campaign::memory_guests::main(&arguments)?;
            true
        }
        Command::MemoryKills(arguments) => {
            campaign::memory_kills::main(&arguments)?;
            true
        }
        Command::Migrate(arguments) => {
            migrate::run(&arguments)?;
            true
        }
        Command::MigrateKills(arguments) => {
            campaign::migrate_kills::main(&arguments)?;
            true
        }
        Command::Prefetch(arguments) => {
            prefetch::run(&arguments)?;
            true
        }
        Command::Qcow2(arguments) => {
            qcow2::run(&arguments)?;
            true
        }
        Command::Restart(arguments) => {
            campaign::restarts::main(&arguments)?;
            true
        }
        Command::Select(arguments) => {
            select::run(&arguments)?;
            true
        }
        Command::Simulate(arguments) => simulate::run(&arguments)?,
        Command::Space(arguments) => space::run(&arguments)?,
        Command::HostileGuest(arguments) => hostile_guest::run(&arguments)?,
        Command::HostileImages(arguments) => hostile_images::run(&arguments)?,
        Command::TouchMemory(arguments) => {
            memory::touch::main(&arguments)?;
            true
        }
        Command::VerifyMemory(arguments) => {
            campaign::verifier::main(&arguments)?;
            true
        }
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

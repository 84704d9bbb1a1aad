//! The program: parses the command line, and runs the command.

mod advise;
mod bench_codec;
mod bench_policy;
mod cli;
mod concurrent;
mod disk_cache;
mod disk_chain;
mod disk_check;
mod disk_discard;
mod disk_image;
mod disk_info;
mod disk_resize;
mod disk_serve;
mod disk_tune;
mod host;
mod libvirt;
mod log;
mod memory;
mod memory_table;
mod migrate;
mod migration_table;
mod open;
mod output;
mod pid_file;
mod rates;
mod run;
mod signals;
mod status;
mod systemd_notify;
mod top;
mod vm;
mod vm_pin;

use std::process::ExitCode;

use clap::Parser;
use larder_vm::control::events;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use cli::{BenchCommand, Cli, Command, DiskCommand};

/// Exit status of a usage error or a failure; 0 is success, 1 a negative result.
const EXIT_ERROR: u8 = 2;

/// Exit status of a command that worked and has a negative answer.
const EXIT_NEGATIVE: u8 = 1;

fn main() -> ExitCode {
    // Started as /proc/self/exe, the process would be listed as `exe`. A failure here changes nothing else.
    let _ = rustix::thread::set_name(c"larder");
    signals::fail_writes_past_size_limit();
    let cli =
        Cli::try_parse().unwrap_or_else(|error| cli::explain_non_utf8_argument(run::explain_usage_error(error)).exit());
    let (levels, warning) = log::levels();
    tracing_subscriber::registry().with(log::layers(&levels)).with(events::layer()).init();
    if let Some(warning) = warning {
        tracing::warn!("{warning}");
    }
    abort_on_panic();
    let result = match cli.command {
        Command::Run(arguments) => run::run(arguments),
        Command::Vm(arguments) => vm::run(arguments),
        Command::Disk(DiskCommand::Serve(arguments)) => disk_serve::run(arguments),
        Command::Disk(DiskCommand::Info(arguments)) => disk_info::run(arguments),
        Command::Disk(DiskCommand::Check(arguments)) => disk_check::run(arguments),
        Command::Disk(DiskCommand::Tune(arguments)) => disk_tune::run(arguments),
        Command::Disk(DiskCommand::Resize(arguments)) => disk_resize::run(arguments),
        Command::Disk(DiskCommand::Cache(command)) => disk_cache::run(command),
        Command::Memory(command) => memory::run(command),
        Command::Migrate(arguments) => migrate::run(*arguments),
        Command::Libvirt(command) => libvirt::run(command),
        Command::Host(arguments) => host::run(arguments),
        Command::Status(arguments) => status::run(arguments),
        Command::Top(arguments) => top::run(arguments),
        Command::Advise(arguments) => advise::run(&arguments),
        Command::Bench(BenchCommand::Policy(arguments)) => bench_policy::run(arguments),
        Command::Bench(BenchCommand::Codec(arguments)) => bench_codec::run(&arguments),
        Command::Open(arguments) => open::run(&arguments),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            report(&error);
            ExitCode::from(EXIT_ERROR)
        }
    }
}

fn report(error: &anyhow::Error) {
    output::print_stderr(&message(error));
}

/// Returns the error and its causes, without causes that the text contains already.
fn message(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Makes a panic in any thread abort the process: it would otherwise continue without that thread, whereas its
/// successor resumes the requests in flight.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

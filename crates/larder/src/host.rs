//! `larder host`.

use std::process::ExitCode;

use larder_host::{BalanceConfig, Host, HostConfig, Policy};

use crate::cli::watch::HostArguments;
use crate::signals;

pub(crate) fn run(arguments: HostArguments) -> anyhow::Result<ExitCode> {
    let signals = signals::block()?;
    let host = Host::new(&HostConfig {
        listen: arguments.listen,
        tls_certificates: arguments.tls_certificates,
        token_file: arguments.token_file,
        balance: arguments.balance_memory.then_some(BalanceConfig {
            policy: Policy {
                reserve: arguments.memory_reserve.get(),
                stall: arguments.memory_stall,
            },
            period: arguments.memory_period,
        }),
    })?;
    tracing::info!(
        dashboard = host.url(),
        metrics = format!("{}metrics", host.url()),
        "ready"
    );
    let stop = host.stop();
    signals.stop_by(move || stop.stop())?;
    host.run();
    Ok(ExitCode::SUCCESS)
}

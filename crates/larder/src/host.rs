//! `larder host`.

use std::process::ExitCode;

use larder_host::{Address, BalanceConfig, Host, HostConfig, Policy};
use larder_vm::listen::Access;

use crate::cli::watch::HostArguments;
use crate::signals;

pub(crate) fn run(arguments: HostArguments) -> anyhow::Result<ExitCode> {
    let signals = signals::block()?;
    let host = Host::new(&HostConfig {
        listen: arguments.listen,
        socket: Access {
            mode: arguments.socket_mode,
            owner: arguments.socket_owner,
            group: arguments.socket_group,
            readers: None,
        },
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
    let token_file = host.token_file().map(|path| path.display().to_string());
    match host.address() {
        Address::Url(url) => {
            tracing::info!(dashboard = url, metrics = format!("{url}metrics"), token_file, "ready");
        }
        Address::Socket(path) => tracing::info!(socket = %path.display(), token_file, "ready"),
    }
    let stop = host.stop();
    signals.stop_by(move || stop.stop())?;
    host.run();
    Ok(ExitCode::SUCCESS)
}

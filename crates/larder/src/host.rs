//! `larder host`.

use std::process::ExitCode;

use larder_host::{BalanceConfig, BalancePolicy, HostConfig, HostServer, ServerAddress};
use larder_vm::listen::Access;

use crate::cli::watch::HostArguments;
use crate::signals;

pub(crate) fn run(arguments: HostArguments) -> anyhow::Result<ExitCode> {
    let signals = signals::block()?;
    let host = HostServer::new(&HostConfig {
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
            policy: BalancePolicy { reserve: arguments.memory_reserve.get(), stall: arguments.memory_stall },
            period: arguments.memory_period,
        }),
    })?;
    let token_file = host.token_file().map(|path| path.display().to_string());
    match host.address() {
        ServerAddress::Url(url) => {
            tracing::info!(dashboard = url, metrics = format!("{url}metrics"), token_file, "ready");
        }
        ServerAddress::Socket(path) => tracing::info!(socket = %path.display(), token_file, "ready"),
    }
    let stop = host.stop();
    signals.on_stop(move || stop.stop())?;
    host.run();
    Ok(ExitCode::SUCCESS)
}

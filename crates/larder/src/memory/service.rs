//! `larder memory attach --vm` and `--wait`: waits for the process before it manages its memory.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_vm::memory::attach_retry::QemuProcess;
use larder_vm::memory::service::{MemoryService, ServiceProgress};
use larder_vm::memory::spec::MemorySpec;
use larder_vm::vm::config::{QemuLocation, vm_file_path};

use super::parse_pid;
use crate::cli::memory::MemoryAttachArguments;
use crate::signals;
use crate::systemd_notify::{Notifier, ServiceState};
use crate::vm::report_start_failure;

fn poll_max(arguments: &MemoryAttachArguments) -> Duration {
    arguments.poll_us.map_or(POLL_MAX_DEFAULT, Duration::from_micros)
}

/// Manages the memory of all QEMUs of a VM, one after the other.
pub(super) fn attach_vm(name: &Path, arguments: &MemoryAttachArguments) -> anyhow::Result<ExitCode> {
    let file = vm_file_path(name)?;
    match MemoryService::for_vm(&file, poll_max(arguments)) {
        Ok(service) => run(service),
        // A guest may be waiting for this pager, which decides the exit status.
        Err(error) => Ok(report_start_failure(&error.into(), false)),
    }
}

/// Manages the memory of one process, which may have been started only just now.
pub(super) fn attach_one(arguments: MemoryAttachArguments, spec: MemorySpec) -> anyhow::Result<ExitCode> {
    let poll_max = poll_max(&arguments);
    let control = arguments.control;
    run(match (arguments.pid, arguments.qmp) {
        (Some(pid), _) => {
            let process =
                QemuProcess::find_alive(parse_pid(pid)?).with_context(|| format!("there is no process {pid}"))?;
            MemoryService::for_process(process, spec, poll_max, control)
        }
        (None, path) => {
            let path = path.context(super::NO_PROCESS_GIVEN)?;
            MemoryService::for_qemu(QemuLocation::Qmp(path), spec, poll_max, control)
        }
    })
}

fn run(service: MemoryService) -> anyhow::Result<ExitCode> {
    let signals = signals::block()?;
    let handle = service.handle();
    std::thread::Builder::new().name("larder-signals".to_owned()).spawn(move || {
        loop {
            match signals.wait() {
                libc::SIGHUP => handle.reload(),
                _ => handle.stop(),
            }
        }
    })?;
    let notifier = Notifier::new()?;
    let ended = service.run(|progress| notifier.notify(service_state(progress)));
    notifier.finish();
    ended?;
    Ok(ExitCode::SUCCESS)
}

fn service_state(progress: ServiceProgress) -> ServiceState {
    match progress {
        ServiceProgress::Waiting(place) => ServiceState::Ready(format!("waiting for QEMU: {place}")),
        ServiceProgress::Attaching(pid) => ServiceState::Ready(format!("attaching to process {pid}")),
        ServiceProgress::Managing(pid, budget) => {
            ServiceState::Ready(format!("managing the memory of process {pid} within {budget}"))
        }
        ServiceProgress::Detached(pid) => ServiceState::Ready(format!(
            "detached from process {pid}, as requested; waiting for the next one, or SIGHUP"
        )),
        ServiceProgress::Reloading => ServiceState::Reloading,
        ServiceProgress::Stopping => ServiceState::Stopping,
    }
}

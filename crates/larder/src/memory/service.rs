//! `larder memory attach --vm` and `--wait`: waits for the process before it manages its memory.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_vm::memory::approach::Process;
use larder_vm::memory::service::{MemoryService, Progress};
use larder_vm::memory::wish::MemoryWish;
use larder_vm::vm::config::{QemuAt, path_of};

use super::pid_of;
use crate::cli::memory::MemoryAttachArguments;
use crate::signals;
use crate::starter::{News, Starter};
use crate::vm::not_started;

fn poll_max(arguments: &MemoryAttachArguments) -> Duration {
    arguments.poll_us.map_or(POLL_MAX_DEFAULT, Duration::from_micros)
}

/// Manages the memory of all QEMUs of a VM, one after the other.
pub(super) fn of_vm(name: &Path, arguments: &MemoryAttachArguments) -> anyhow::Result<ExitCode> {
    let file = path_of(name)?;
    match MemoryService::of_vm(&file, poll_max(arguments)) {
        Ok(service) => run(service),
        // A guest may be waiting for this pager, which decides the exit status.
        Err(error) => Ok(not_started(&error.into(), false)),
    }
}

/// Manages the memory of one process, which may have been started only just now.
pub(super) fn of_one(arguments: MemoryAttachArguments, wish: MemoryWish) -> anyhow::Result<ExitCode> {
    let poll_max = poll_max(&arguments);
    let control = arguments.control;
    run(match (arguments.pid, arguments.qmp) {
        (Some(pid), _) => {
            let process = Process::alive(pid_of(pid)?).with_context(|| format!("there is no process {pid}"))?;
            MemoryService::of_process(process, wish, poll_max, control)
        }
        (None, path) => {
            let path = path.context(super::WHOSE)?;
            MemoryService::of_qemu(QemuAt::Qmp(path), wish, poll_max, control)
        }
    })
}

fn run(service: MemoryService) -> anyhow::Result<ExitCode> {
    let signals = signals::block()?;
    let orders = service.orders();
    std::thread::Builder::new()
        .name("larder-signals".to_owned())
        .spawn(move || {
            loop {
                match signals.wait() {
                    libc::SIGHUP => orders.reload(),
                    _ => orders.stop(),
                }
            }
        })?;
    let starter = Starter::new()?;
    let ended = service.run(|progress| starter.tell(news(progress)));
    starter.end();
    ended?;
    Ok(ExitCode::SUCCESS)
}

fn news(progress: Progress) -> News {
    match progress {
        Progress::Waiting(place) => News::Ready(format!("waiting for QEMU: {place}")),
        Progress::Approaching(pid) => News::Ready(format!("attaching to process {pid}")),
        Progress::Managing(pid, budget) => News::Ready(format!("managing the memory of process {pid} within {budget}")),
        Progress::LetGo(pid) => News::Ready(format!(
            "detached from process {pid}, as requested; waiting for the next one, or SIGHUP"
        )),
        Progress::Reloading => News::Reloading,
        Progress::Stopping => News::Stopping,
    }
}

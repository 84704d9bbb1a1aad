//! Reload of the VM's file while the VM is served.
//!
//! The file is authoritative: all settings get the values in the file, even if a client has changed them meanwhile.
//! Changes that are not possible while the disk is in use are reported, and not applied.

use std::collections::VecDeque;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use larder_block::ByteLen;
use larder_export::vhost_user::StopMode;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use super::config::{VmConfig, VmDisk};
use super::file_conflicts::cache_conflict;
use super::{Vm, VmCommand, VmError, active_queues_path, check_socket_paths, run_disk};
use crate::control::ReloadReply;
use crate::control::requests::ReloadResult;
use crate::control::state::{CacheState, DiskState, LimitsState, PrefetchState};
use crate::disk::{CacheOperation, Disk, DiskChange, DiskConfig, DiskError, DiskHandle, DiskSettings};
use crate::disk_spec::DiskSpec;
use crate::image::{ImageAddress, PrefetchOptions, ReplaceOptions, cache_mode_name, is_same_image};

/// Longest time for which a disk's thread may take to report its state.
const STATE_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for a change, which then continues in the background.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for a removed disk to end, before new disks are started.
const DISK_STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval between checks for a stop command while a disk is being started.
const START_POLL_INTERVAL: Duration = Duration::from_millis(20);

const DISK_STUCK: &str = "its thread does not answer; is its storage stuck?";

const CACHES_STUCK: &str = "the file systems of its cache and of the one in the file do not answer, so the cache is not replaced; is one of them stuck?";

impl Vm {
    /// Reloads the file, applies it, and reports the result. Commands that arrive meanwhile are put into `deferred`.
    pub(super) fn reload_and_report(&mut self, reply: Option<ReloadReply>, deferred: &mut VecDeque<VmCommand>) {
        let done = self.reload(deferred);
        match &done {
            Ok(done) => {
                tracing::info!(
                    "the VM's file was reloaded: {} changed, {} pending, {} failed",
                    done.changed.len(),
                    done.left.len(),
                    done.failed.len()
                );
                done.left.iter().for_each(|what| tracing::warn!("pending: {what}"));
                done.failed.iter().for_each(|what| tracing::error!("failed: {what}"));
            }
            Err(error) => tracing::error!("nothing has changed: {error}"),
        }
        if let Some(reply) = reply {
            // The client may have stopped waiting.
            let _ = reply.send(done);
        }
    }

    fn reload(&mut self, before: &mut VecDeque<VmCommand>) -> Result<ReloadResult, String> {
        if self.is_inactive {
            return Err("the VM is on another host, and its images are not open: its file takes effect when the VM's server is restarted".to_owned());
        }
        let new_config = VmConfig::read(&self.file).map_err(|error| error.to_string())?;
        if new_config.disks.is_empty() {
            return Err(VmError::no_disk(&self.file).to_string());
        }
        check_socket_paths(&new_config, &self.inherited).map_err(|error| error.to_string())?;
        let since = Instant::now();
        if let Some(clash) = cache_conflict(&new_config, || since.elapsed() > STATE_TIMEOUT) {
            return Err(clash);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let mut change = ReloadContext {
            runtime: runtime.map_err(|error| format!("cannot query the state of the disks: {error}"))?,
            result: ReloadResult::default(),
        };
        if (&new_config.control, new_config.control_access) != (&self.config.control, self.config.control_access) {
            change.add_pending("", "the control socket");
        }
        if new_config.memory != self.config.memory {
            change.add_pending("", &other_process_message(&new_config.name));
            // This process does nothing else about memory.
            self.config.memory.clone_from(&new_config.memory);
        }
        self.remove_disks(&new_config, &mut change, before);
        for new_disk in &new_config.disks {
            let now = self.config.disks.iter().find(|disk| disk.name == new_disk.name);
            let running_disk = self.disks.iter().find(|disk| disk.name == new_disk.name);
            if let (Some(now), Some(running_disk)) = (now, running_disk) {
                change.update_disk(now, new_disk, &running_disk.inquiry);
            }
        }
        self.add_disks(&new_config, &mut change, before);
        self.subject.set_disks(self.disks.iter().map(|disk| disk.inquiry.clone()).collect());
        Ok(change.result)
    }

    /// Stops the disks that are no longer `wanted`, if they are unused.
    fn remove_disks(&mut self, wanted: &VmConfig, change: &mut ReloadContext, before: &mut VecDeque<VmCommand>) {
        let is_in_file = |name: &str| wanted.disks.iter().any(|disk| disk.name == name);
        let mut ending = Vec::new();
        for disk in self.disks.iter_mut().filter(|disk| !is_in_file(&disk.name)) {
            match change.state(&disk.inquiry) {
                Some(state) if is_used(&state) => change.add_pending(
                    &disk.name,
                    "it is in use, and is still served; detach it from the guest, then reload again",
                ),
                Some(_) => {
                    disk.is_removed = true;
                    disk.stop.set(StopMode::Close);
                    ending.push(disk.name.clone());
                }
                None => change.add_failed(&disk.name, DISK_STUCK),
            }
        }
        while !ending.is_empty() {
            match self.commands.recv_timeout(DISK_STOP_TIMEOUT) {
                Ok(VmCommand::Ended(name, how)) if ending.contains(&name) => {
                    ending.retain(|ending| *ending != name);
                    self.config.disks.retain(|disk| disk.name != name);
                    match &how {
                        Ok(()) => change.add_changed(&name, "it is not served any more"),
                        Err(error) => change.add_failed(&name, &error.to_string()),
                    }
                    // The disk was meant to end, so its result does not become the VM's.
                    self.on_disk_ended(&name, how, &mut Ok(()));
                }
                Ok(order) => before.push_back(order),
                Err(_) => {
                    ending.iter().for_each(|name| change.add_failed(name, "it has not ended yet, but will"));
                    return;
                }
            }
        }
    }

    /// Starts a disk. Commands that arrive meanwhile are put into `before`, and a stop command cancels the start.
    fn start_disk(&self, disk: DiskConfig, before: &mut VecDeque<VmCommand>) -> Result<Disk, DiskError> {
        let cancel = disk.cancel.clone();
        let started = start_in_thread(disk);
        loop {
            match started.recv_timeout(START_POLL_INTERVAL) {
                Ok(started) => return started,
                Err(RecvTimeoutError::Disconnected) => return Err(DiskError::ThreadDied),
                Err(RecvTimeoutError::Timeout) => {}
            }
            for order in self.commands.try_iter() {
                if matches!(order, VmCommand::Stop) {
                    cancel.set(());
                }
                before.push_back(order);
            }
        }
    }

    /// Serves the new disks in `wanted`.
    fn add_disks(&mut self, wanted: &VmConfig, change: &mut ReloadContext, before: &mut VecDeque<VmCommand>) {
        for new_disk in &wanted.disks {
            if self.disks.iter().any(|disk| disk.name == new_disk.name) {
                continue;
            }
            if self.is_confined {
                let why = "it is new, and this server is confined: it is served when the VM's server is restarted, which the guest survives";
                change.add_pending(&new_disk.name, why);
                continue;
            }
            let mut disk = new_disk.config(&self.inherited);
            disk.exports.active_queues_file = Some(active_queues_path(&new_disk.name));
            disk.exports.domain.clone_from(&wanted.uuid);
            match self.start_disk(disk, before) {
                Ok(disk) => {
                    change.add_changed(&new_disk.name, "it is served now");
                    self.disks.push(run_disk(&new_disk.name, disk, &self.command_sender));
                    self.config.disks.push(new_disk.clone());
                }
                Err(error) => change.add_failed(&new_disk.name, &error.to_string()),
            }
        }
        // The disks follow the order of the file; those that are no longer in it are last.
        let place = |name: &str| wanted.disks.iter().position(|disk| disk.name == name);
        self.disks.sort_by_key(|disk| place(&disk.name).unwrap_or(usize::MAX));
        self.config.disks.sort_by_key(|disk| place(&disk.name).unwrap_or(usize::MAX));
    }
}

/// Starts a disk on another thread, because its storage may delay the start, and a stop command must be able to
/// cancel it.
fn start_in_thread(disk: DiskConfig) -> mpsc::Receiver<Result<Disk, DiskError>> {
    let (sender, started) = mpsc::channel();
    std::thread::spawn(move || {
        // The receiver is dropped early only when the process ends.
        let _ = sender.send(Disk::start(disk));
    });
    started
}

/// Returns the message that another process manages the memory.
fn other_process_message(vm: &str) -> String {
    format!(
        "memory: not managed by this server; `systemctl reload larder-memory@{vm}`, or SIGHUP to `larder memory attach --vm`, applies the change"
    )
}

fn is_used(state: &DiskState) -> bool {
    let exports = &state.exports;
    exports.vhost_user.as_ref().is_some_and(|server| server.connected)
        || exports.nbd.as_ref().is_some_and(|server| server.clients > 0)
}

/// Changes made so far.
struct ReloadContext {
    runtime: Runtime,
    result: ReloadResult,
}

fn with_disk_name(disk: &str, what: &str) -> String {
    match disk {
        "" => what.to_owned(),
        disk => format!("disk {disk}: {what}"),
    }
}

impl ReloadContext {
    fn add_changed(&mut self, disk: &str, what: &str) {
        self.result.changed.push(with_disk_name(disk, what));
    }

    fn add_pending(&mut self, disk: &str, what: &str) {
        self.result.left.push(with_disk_name(disk, what));
    }

    fn add_failed(&mut self, disk: &str, why: &str) {
        self.result.failed.push(with_disk_name(disk, why));
    }

    fn state(&self, disk: &DiskHandle) -> Option<DiskState> {
        let reply = self.runtime.block_on(async { timeout(STATE_TIMEOUT, disk.state()).await });
        reply.ok().flatten()
    }

    /// Changes a disk; returns its state afterwards, or `before` if that is unknown.
    fn apply(&mut self, name: &str, disk: &DiskHandle, change: DiskChange, before: DiskState) -> DiskState {
        let changed = async { timeout(CHANGE_TIMEOUT, disk.change(change)).await };
        match self.runtime.block_on(changed) {
            Ok(Some(Ok(state))) => return state,
            Ok(Some(Err(error))) => self.add_failed(name, &error.to_string()),
            Ok(None) => self.add_failed(name, "it is being closed"),
            Err(_) => self.add_pending(name, "the change is not complete yet, and continues; see `larder status`"),
        }
        self.state(disk).unwrap_or(before)
    }

    /// Applies the file to a disk that is served with the configuration `now`.
    fn update_disk(&mut self, now: &VmDisk, wanted: &VmDisk, disk: &DiskHandle) {
        let name = &wanted.name;
        {
            let _recording = disk.trace().record_thread();
            tracing::debug!(event = "reload", disk = name, "the VM's file is applied to the disk");
        }
        let fixed = restart_only_changes(now, wanted);
        if !fixed.is_empty() {
            let keys = fixed.join(", ");
            self.add_pending(name, &format!("{keys}: takes effect when the VM's server is restarted"));
        }
        let Some(before) = self.state(disk) else {
            return self.add_failed(name, DISK_STUCK);
        };
        let mut after = before.clone();
        match replacement_cache(&before, &wanted.spec) {
            Ok(None) => {}
            Ok(Some(by)) => after = self.apply(name, disk, DiskChange::Cache(CacheOperation::Replace(by)), after),
            Err(why) => self.add_failed(name, why),
        }
        let settings = settings(&wanted.spec, &after);
        let after = self.apply(name, disk, DiskChange::Settings(settings), after);
        for what in describe_differences(&before, &after) {
            self.add_changed(name, &what);
        }
    }
}

/// Returns the keys that differ between the file and `now`, and cannot be changed while the disk is in use.
fn restart_only_changes(now: &VmDisk, wanted: &VmDisk) -> Vec<&'static str> {
    // The patterns name all fields, so that a new field cannot be forgotten here.
    let VmDisk { name: _, spec, socket, access, nbd } = wanted;
    let DiskSpec {
        image,
        format,
        chain,
        metadata_memory,
        prefetch: _,
        disk_cache,
        control: _,
        read_only,
        share,
        page_cache: cache,
        queues,
        queue_size,
        serial,
        block_size,
        discard,
        poll_us,
        nbd_reconnect,
        limits: _,
    } = spec;
    let old = &now.spec;
    let has_cache = |spec: &DiskSpec| spec.disk_cache.file.is_some();
    let all = [
        ("image", *image != old.image),
        ("format", *format != old.format),
        ("data-file, backing", *chain != old.chain),
        ("metadata-memory", *metadata_memory != old.metadata_memory),
        ("cache", *cache != old.page_cache || has_cache(spec) != has_cache(old)),
        ("cache-line", disk_cache.line != old.disk_cache.line),
        ("cache-exclusive", disk_cache.exclusive != old.disk_cache.exclusive),
        ("readonly", *read_only != old.read_only),
        ("share", *share != old.share),
        ("queues", *queues != old.queues),
        ("queue-size", *queue_size != old.queue_size),
        ("serial", *serial != old.serial),
        ("block-size", *block_size != old.block_size),
        ("discard", *discard != old.discard),
        ("poll-us", *poll_us != old.poll_us),
        ("nbd-reconnect", *nbd_reconnect != old.nbd_reconnect),
        ("socket", *socket != now.socket),
        ("socket-mode, socket-owner, socket-group", *access != now.access),
        ("nbd", *nbd != now.nbd),
    ];
    all.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| key).collect()
}

/// Returns the cache that is to replace a disk's, if it is another one.
///
/// # Errors
/// The comparison does not complete in time.
fn replacement_cache(now: &DiskState, wanted: &DiskSpec) -> Result<Option<ReplaceOptions>, &'static str> {
    let (Some(file), Some(cache)) = (&wanted.disk_cache.file, &now.cache) else {
        return Ok(None);
    };
    let Ok(current) = cache.file.parse::<ImageAddress>() else {
        return Ok(None);
    };
    let is_same = is_same_with_timeout(file.clone(), current).ok_or(CACHES_STUCK)?;
    Ok((!is_same).then(|| ReplaceOptions { file: Some(file.clone()), size: wanted.disk_cache.size, lose_dirty: false }))
}

/// Returns whether both addresses lead to the same file; `None` if a file server does not answer in time.
fn is_same_with_timeout(one: ImageAddress, other: ImageAddress) -> Option<bool> {
    if one == other {
        return Some(true);
    }
    let (sender, answer) = mpsc::channel();
    std::thread::spawn(move || {
        // The receiver may have stopped waiting.
        let _ = sender.send(is_same_image(&one, &other));
    });
    answer.recv_timeout(STATE_TIMEOUT).ok()
}

/// Returns the settings of `wanted` that differ from the state `now`.
fn settings(wanted: &DiskSpec, now: &DiskState) -> DiskSettings {
    // Contradicting options were refused when the file was parsed.
    let options = wanted.image_options().unwrap_or_default();
    let prefetch = options.prefetch.unwrap_or(PrefetchOptions::OFF);
    let has_prefetch_settings = |of: &PrefetchState| {
        (of.memory_limit, of.ahead, of.largest_read)
            == (prefetch.memory.get(), prefetch.ahead_max.get(), prefetch.largest_read.get())
    };
    let cache = now.cache.as_ref();
    let mode = cache.and_then(|cache| wanted.disk_cache.mode.filter(|mode| cache_mode_name(*mode) != cache.mode));
    let endurance = wanted.disk_cache.endurance;
    let has_endurance = |cache: &CacheState| cache.endurance == endurance.map(|bytes| bytes.get());
    DiskSettings {
        limits: (LimitsState::new(options.limits) != now.limits).then_some(options.limits),
        prefetch: now.prefetch.as_ref().filter(|of| !has_prefetch_settings(of)).map(|_| prefetch),
        cache_endurance: cache.filter(|cache| !has_endurance(cache)).map(|_| endurance),
        cache_mode: mode,
    }
}

/// Describes the differences between two states of a disk, for users.
fn describe_differences(before: &DiskState, after: &DiskState) -> Vec<String> {
    let mut all = Vec::new();
    if before.limits != after.limits {
        let limits = match after.limits.to_string() {
            none if none.is_empty() => "none".to_owned(),
            limits => limits,
        };
        all.push(format!("limits: {limits}"));
    }
    if let (Some(old), Some(new)) = (&before.prefetch, &after.prefetch) {
        let of = |state: &PrefetchState| (state.memory_limit, state.ahead, state.largest_read);
        match of(new) {
            same if same == of(old) => {}
            (0, ..) => all.push("prefetch: off".to_owned()),
            (memory, ahead, largest) => all.push(format!(
                "prefetch: {} of memory, {} ahead, for reads of at most {}",
                ByteLen::new(memory),
                ByteLen::new(ahead),
                ByteLen::new(largest)
            )),
        }
    }
    if let (Some(old), Some(new)) = (&before.cache, &after.cache) {
        if old.file != new.file {
            all.push(format!("cache: {}", new.file));
        }
        if old.mode != new.mode {
            all.push(format!("cache-mode: {}", new.mode));
        }
        if old.endurance != new.endurance {
            let endurance = new.endurance.map(ByteLen::new);
            all.push(match endurance {
                Some(bytes) => format!("cache-endurance: {bytes}"),
                None => "cache-endurance: none".to_owned(),
            });
        }
    }
    all
}

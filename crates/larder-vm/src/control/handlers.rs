//! Request handlers of the control socket.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{ALLOW, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, StatusCode, Version};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use super::events::{EventBuffer, events};
use super::http_response::{HttpResponse, event_stream, full_response};
use super::memory::{DetachResult, MemoryPatch};
use super::migration::{CancelResult, MigrationHandle, MigrationPatch};
use super::openapi;
use super::requests::{CacheReplacement, DiskPatch, HotRanges, MoveRequest, ReloadResult, RequestError};
use super::state::{DiskList, ErrorBody};
use super::subject::Subject;
use super::{
    CANCEL_DETACH_PATH, CANCEL_MIGRATION_PATH, DETACH_PATH, DISKS_PATH, EVENTS_PATH, MEMORY_PATH, MIGRATION_PATH,
    MOVE_PATH, OPENAPI_PATH, RELOAD_PATH, SERVER_PATH, TRACE_PATH,
};
use crate::disk::{CacheOperation, DiskAction, DiskChange, DiskHandle, format_hot_ranges, parse_hot_ranges};
use crate::memory::MemoryHandle;
use crate::read_group::READ_GROUP;
use crate::vm::{MoveStep, MoveStepResult};

/// Longest time that a disk may take to report its state.
const DISK_REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for a change, before the answer says that it continues.
const CHANGE_REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest wait for a reload, which may make several changes.
const RELOAD_REPLY_TIMEOUT: Duration = Duration::from_secs(8);

/// Maximum length of a request's body, in bytes.
const BODY_BYTES_MAX: usize = 4 << 10;

/// Maximum length of a body with hot ranges, in bytes: that of a message between two movers.
const HOT_RANGES_BODY_BYTES_MAX: usize = 64 << 10;

/// Largest integer up to which every integer is exact as a floating-point number.
const EXACT_INTEGER_MAX: f64 = (1u64 << 53) as f64;

/// Idle time of an event stream after which a keep-alive comment is sent.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Longest time for which a subscriber may read nothing.
const CLIENT_STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Header with which a client that reconnects gives the last event that it received.
const LAST_EVENT_ID: &str = "last-event-id";

/// Requests of one connection so far.
pub(super) struct ConnectionState {
    request_kind: AtomicU8,
    /// Limit on the number of event subscribers.
    subscriber_slots: Arc<Semaphore>,
    /// The client may change something, not only read.
    may_change: bool,
    stream_stalled: Notify,
}

const NO_REQUEST: u8 = 0;
const PLAIN_REQUEST: u8 = 1;
const EVENT_STREAM: u8 = 2;

impl ConnectionState {
    pub(super) fn new(subscriber_slots: Arc<Semaphore>, may_change: bool) -> Self {
        Self { request_kind: AtomicU8::new(NO_REQUEST), subscriber_slots, may_change, stream_stalled: Notify::new() }
    }

    pub(super) fn is_awaiting_request(&self) -> bool {
        self.request_kind.load(Ordering::Relaxed) == NO_REQUEST
    }

    pub(super) fn is_subscriber(&self) -> bool {
        self.request_kind.load(Ordering::Relaxed) == EVENT_STREAM
    }

    /// Completes when an event subscriber has stopped reading, or its stream has ended.
    pub(super) async fn stalled(&self) {
        self.stream_stalled.notified().await;
    }

    fn set_request_kind(&self, request_kind: u8) {
        self.request_kind.store(request_kind, Ordering::Relaxed);
    }
}

/// A resource of the API.
enum Resource {
    Server,
    OpenApi,
    Events,
    Trace,
    Reload,
    Move,
    Memory(Option<MemoryHandle>),
    Detach(Option<MemoryHandle>),
    CancelDetach(Option<MemoryHandle>),
    Migration(Option<MigrationHandle>),
    Cancel(Option<MigrationHandle>),
    Disks,
    Disk(DiskHandle),
    Flush(DiskHandle),
    Replace(DiskHandle),
    Hot(DiskHandle),
}

impl Resource {
    fn from_path(path: &str, subject: &Subject) -> Option<Self> {
        match path {
            SERVER_PATH => return Some(Self::Server),
            OPENAPI_PATH => return Some(Self::OpenApi),
            EVENTS_PATH => return Some(Self::Events),
            TRACE_PATH => return Some(Self::Trace),
            RELOAD_PATH => return Some(Self::Reload),
            MOVE_PATH => return Some(Self::Move),
            DISKS_PATH => return Some(Self::Disks),
            MEMORY_PATH => return Some(Self::Memory(subject.memory_handle())),
            DETACH_PATH => return Some(Self::Detach(subject.memory_handle())),
            CANCEL_DETACH_PATH => return Some(Self::CancelDetach(subject.memory_handle())),
            MIGRATION_PATH => return Some(Self::Migration(subject.migration_handle())),
            CANCEL_MIGRATION_PATH => return Some(Self::Cancel(subject.migration_handle())),
            _ => {}
        }
        let disk_path = path.strip_prefix(DISKS_PATH)?.strip_prefix('/')?;
        let (disk, action) = disk_path.split_once('/').unwrap_or((disk_path, ""));
        let disk = subject.find_disk(disk)?;
        match action {
            "" if !disk_path.ends_with('/') => Some(Self::Disk(disk)),
            "cache/flush" => Some(Self::Flush(disk)),
            "cache/replace" => Some(Self::Replace(disk)),
            "hot" => Some(Self::Hot(disk)),
            _ => None,
        }
    }

    /// Returns the methods that the resource supports.
    fn methods(&self) -> &'static str {
        match self {
            Self::Server | Self::OpenApi | Self::Events | Self::Trace | Self::Disks => "GET, HEAD",
            Self::Disk(_) | Self::Memory(_) | Self::Migration(_) => "GET, HEAD, PATCH",
            Self::Hot(_) => "GET, HEAD, POST",
            Self::Detach(_)
            | Self::CancelDetach(_)
            | Self::Cancel(_)
            | Self::Flush(_)
            | Self::Replace(_)
            | Self::Reload
            | Self::Move => "POST",
        }
    }
}

pub(super) async fn handle_request(
    request: Request<Incoming>,
    subject: &Subject,
    asked: &Arc<ConnectionState>,
) -> HttpResponse {
    asked.set_request_kind(PLAIN_REQUEST);
    // RFC 9112, 3.2.
    if request.version() == Version::HTTP_11 && request.headers().get_all(HOST).iter().count() != 1 {
        return error_response(StatusCode::BAD_REQUEST, "an HTTP/1.1 request has one Host header; any name will do");
    }
    if !asked.may_change && !matches!(*request.method(), Method::GET | Method::HEAD) {
        // A client that is still sending when the connection is closed may never see the answer.
        let _ = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
        return error_response(
            StatusCode::FORBIDDEN,
            format_args!(
                "this client may only read: a change requires root, the server's user, or the owner or group of the \
                 socket (control-owner, control-group in the VM's file); members of {READ_GROUP} may only read"
            ),
        );
    }
    let path = request.uri().path().to_owned();
    let Some(resource) = Resource::from_path(&path, subject) else {
        return error_response(StatusCode::NOT_FOUND, not_found_message(&path, subject));
    };
    let methods = resource.methods();
    if !methods.split(", ").any(|method| request.method() == method) {
        return method_not_allowed(&path, request.method(), methods);
    }
    match resource {
        Resource::Server => ok_response(&subject.state()),
        Resource::OpenApi => ok_response(&openapi::document()),
        Resource::Events if request.method() == Method::HEAD => event_stream(mpsc::channel(1).1),
        Resource::Events => subscribe_events(request.headers(), asked),
        Resource::Trace => ok_response(&subject.traces()),
        Resource::Reload => reload(request, subject).await,
        Resource::Move => apply_move_step(request, subject).await,
        Resource::Disks => disks(&subject.disks()).await,
        Resource::Disk(disk) if request.method() == Method::PATCH => patch_disk(request, &disk).await,
        Resource::Disk(disk) => match with_disk_timeout(disk.state()).await {
            Ok(state) => ok_response(&state),
            Err(late) => late,
        },
        Resource::Memory(None)
        | Resource::Detach(None)
        | Resource::CancelDetach(None)
        | Resource::Migration(None)
        | Resource::Cancel(None) => {
            // A client that is still sending when the connection is closed may never see the answer.
            let _ = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
            error_response(StatusCode::NOT_FOUND, not_found_message(&path, subject))
        }
        Resource::Migration(Some(migration)) if request.method() == Method::PATCH => {
            limit_migration(request, &migration).await
        }
        Resource::Migration(Some(migration)) => ok_response(&migration.state()),
        Resource::Cancel(Some(migration)) => {
            migration.cancel();
            json_response(StatusCode::ACCEPTED, &CancelResult { cancelling: true })
        }
        Resource::Memory(Some(memory)) if request.method() == Method::PATCH => limit_memory(request, &memory).await,
        Resource::Memory(Some(memory)) => match timeout(DISK_REPLY_TIMEOUT, memory.state()).await {
            Ok(Some(state)) => ok_response(&state),
            Ok(None) => memory_unmanaged_response(),
            Err(_) => memory_timeout_response(),
        },
        Resource::Detach(Some(memory)) => detach_memory(&memory).await,
        Resource::CancelDetach(Some(memory)) => match timeout(DISK_REPLY_TIMEOUT, memory.cancel_detach()).await {
            Ok(Some(true)) => json_response(StatusCode::ACCEPTED, &CancelResult { cancelling: true }),
            Ok(Some(false)) => error_response(StatusCode::CONFLICT, "no detach is running"),
            Ok(None) => memory_unmanaged_response(),
            Err(_) => memory_timeout_response(),
        },
        Resource::Flush(disk) => apply_change(&disk, DiskChange::Cache(CacheOperation::Flush)).await,
        Resource::Replace(disk) => replace_cache(request, &disk).await,
        Resource::Hot(disk) if request.method() == Method::POST => warm_cache(request, &disk).await,
        Resource::Hot(disk) => match timeout(RELOAD_REPLY_TIMEOUT, disk.hot_ranges()).await {
            Ok(Some(ranges)) => ok_response(&HotRanges { ranges: format_hot_ranges(&ranges) }),
            Ok(None) => disk_closing_response(),
            Err(_) => error_response(
                StatusCode::SERVICE_UNAVAILABLE,
                "the disk's thread has not returned the hot ranges in time",
            ),
        },
    }
}

fn not_found_message(path: &str, subject: &Subject) -> String {
    let disk_name = path.strip_prefix(DISKS_PATH).and_then(|rest| rest.strip_prefix('/'));
    let disk_name = disk_name.map(|rest| rest.split('/').next().unwrap_or_default());
    match disk_name {
        Some(disk) if subject.find_disk(disk).is_none() => {
            let all = subject.disks();
            let disk_names = all.iter().enumerate().map(|(place, disk)| match disk.name() {
                Some(name) => name.to_owned(),
                None => place.to_string(),
            });
            let disk_names: Vec<String> = disk_names.collect();
            format!("there is no disk '{disk}'; the disks are: {}", disk_names.join(", "))
        }
        _ if subject.memory_handle().is_some() => {
            format!("there is no {path}; there is {MEMORY_PATH}, and what {OPENAPI_PATH} describes")
        }
        _ if subject.migration_handle().is_some() => {
            format!("there is no {path}; there is {MIGRATION_PATH}, and what {OPENAPI_PATH} describes")
        }
        _ => format!("there is no {path}; there is {DISKS_PATH}, and what {OPENAPI_PATH} describes"),
    }
}

async fn disks(all: &[DiskHandle]) -> HttpResponse {
    let mut response = DiskList { disks: Vec::new() };
    for disk in all {
        match with_disk_timeout(disk.state()).await {
            Ok(state) => response.disks.push(state),
            Err(late) => return late,
        }
    }
    ok_response(&response)
}

async fn patch_disk(request: Request<Incoming>, disk: &DiskHandle) -> HttpResponse {
    let body: Result<DiskPatch, RequestError> = parse_body(request, "{\"limits\":{\"iops-total\":1000}}").await;
    match body.and_then(|patch| patch.settings()) {
        Ok(settings) => apply_change(disk, DiskChange::Settings(settings)).await,
        Err(unfit) => request_error_response(unfit),
    }
}

async fn limit_memory(request: Request<Incoming>, memory: &MemoryHandle) -> HttpResponse {
    let patch: MemoryPatch = match parse_body(request, "{\"budget\":1073741824}").await {
        Ok(patch) => patch,
        Err(unfit) => return request_error_response(unfit),
    };
    match timeout(DISK_REPLY_TIMEOUT, memory.limit(patch.limits())).await {
        Ok(Some(Ok(state))) => ok_response(&state),
        Ok(Some(Err(error))) => error_response(StatusCode::CONFLICT, error),
        Ok(None) => memory_unmanaged_response(),
        Err(_) => memory_timeout_response(),
    }
}

async fn limit_migration(request: Request<Incoming>, migration: &MigrationHandle) -> HttpResponse {
    let patch: MigrationPatch = match parse_body(request, "{\"bandwidth\":52428800}").await {
        Ok(patch) => patch,
        Err(unfit) => return request_error_response(unfit),
    };
    if let Err(why) = patch.check() {
        return error_response(StatusCode::BAD_REQUEST, why);
    }
    match migration.limit(&patch) {
        Ok(()) => ok_response(&migration.state()),
        Err(why) => error_response(StatusCode::CONFLICT, why),
    }
}

async fn detach_memory(memory: &MemoryHandle) -> HttpResponse {
    // The detach continues even if the client stops waiting.
    let detaching = memory.clone();
    let detaching = tokio::spawn(async move { detaching.detach().await });
    match timeout(CHANGE_REPLY_TIMEOUT, detaching).await {
        Ok(Ok(Some(Ok(())))) => ok_response(&DetachResult { detached: true }),
        Ok(Ok(Some(Err(error)))) => error_response(StatusCode::CONFLICT, error),
        Ok(_) => memory_unmanaged_response(),
        Err(_) => json_response(StatusCode::ACCEPTED, &DetachResult { detached: false }),
    }
}

fn memory_unmanaged_response() -> HttpResponse {
    error_response(
        StatusCode::SERVICE_UNAVAILABLE,
        "the memory is no longer managed: Larder has detached from it, or its process has ended",
    )
}

fn memory_timeout_response() -> HttpResponse {
    error_response(
        StatusCode::SERVICE_UNAVAILABLE,
        format_args!("the memory's thread has not answered for {} s", DISK_REPLY_TIMEOUT.as_secs()),
    )
}

async fn replace_cache(request: Request<Incoming>, disk: &DiskHandle) -> HttpResponse {
    let body: Result<CacheReplacement, RequestError> = parse_body(request, "{\"with\":\"/ssd/new.cache\"}").await;
    match body.and_then(|by| by.replacement()) {
        Ok(by) => apply_change(disk, DiskChange::Cache(CacheOperation::Replace(by))).await,
        Err(unfit) => request_error_response(unfit),
    }
}

async fn warm_cache(request: Request<Incoming>, disk: &DiskHandle) -> HttpResponse {
    let body: Result<HotRanges, RequestError> =
        parse_body_limited(request, HOT_RANGES_BODY_BYTES_MAX, "{\"ranges\":\"17+3,4+1\"}").await;
    match body.and_then(|hot| Ok(parse_hot_ranges(&hot.ranges)?)) {
        Ok(ranges) => apply_change(disk, DiskChange::Warm(ranges)).await,
        Err(unfit) => request_error_response(unfit),
    }
}

fn request_error_response(unfit: RequestError) -> HttpResponse {
    match unfit {
        RequestError::Malformed(why) => error_response(StatusCode::BAD_REQUEST, why),
        RequestError::Inconsistent(why) => error_response(StatusCode::CONFLICT, why),
    }
}

/// Parses the body; an error compares it with `example`.
async fn parse_body<T: DeserializeOwned>(request: Request<Incoming>, example: &str) -> Result<T, RequestError> {
    parse_body_limited(request, BODY_BYTES_MAX, example).await
}

async fn parse_body_limited<T: DeserializeOwned>(
    request: Request<Incoming>,
    bytes_max: usize,
    example: &str,
) -> Result<T, RequestError> {
    let malformed = |why: String| RequestError::Malformed(format!("the body must be JSON like {example}: {why}"));
    let body = Limited::new(request.into_body(), bytes_max).collect().await;
    let body = body.map_err(|error| malformed(error.to_string()))?.to_bytes();
    let read = |error: serde_json::Error| malformed(error.to_string());
    let mut value: Value = serde_json::from_slice(&body).map_err(read)?;
    if !normalize_integers(&mut value) {
        // serde would deserialise the list as a struct without field names.
        return Err(malformed("it contains a list".to_owned()));
    }
    T::deserialize(value).map_err(read)
}

/// Returns whether the value has no list. Also converts whole numbers with a decimal point to integers.
fn normalize_integers(value: &mut Value) -> bool {
    match value {
        Value::Array(_) => false,
        Value::Object(fields) => fields.values_mut().all(normalize_integers),
        Value::Number(number) => {
            // All numbers of the API are integers, such as a number of bytes, and are exact in this range.
            let whole = number.as_f64().filter(|it| number.is_f64() && it.fract() == 0.0);
            if let Some(whole) = whole.filter(|it| (0.0..=EXACT_INTEGER_MAX).contains(it)) {
                *value = (whole as u64).into();
            }
            true
        }
        _ => true,
    }
}

/// Changes a disk. A change that takes long continues after the answer.
async fn apply_change(disk: &DiskHandle, change: DiskChange) -> HttpResponse {
    match timeout(CHANGE_REPLY_TIMEOUT, disk.change(change)).await {
        Ok(Some(Ok(state))) => ok_response(&state),
        Ok(Some(Err(error))) => error_response(StatusCode::CONFLICT, error),
        Ok(None) => disk_closing_response(),
        Err(_) => match with_disk_timeout(disk.state()).await {
            Ok(state) => json_response(StatusCode::ACCEPTED, &state),
            Err(late) => late,
        },
    }
}

async fn reload(request: Request<Incoming>, subject: &Subject) -> HttpResponse {
    if request.body().size_hint().exact() != Some(0) {
        return error_response(StatusCode::BAD_REQUEST, "the server reads the VM's file itself: send no body");
    }
    let (reply, reply_receiver) = oneshot::channel();
    if !subject.request_reload(reply) {
        return error_response(
            StatusCode::CONFLICT,
            "there is no file to reload: this server was configured on its command line",
        );
    }
    match timeout(RELOAD_REPLY_TIMEOUT, reply_receiver).await {
        Ok(Ok(Ok(reloaded))) => ok_response(&reloaded),
        Ok(Ok(Err(error))) => error_response(StatusCode::CONFLICT, error),
        Ok(Err(_)) => error_response(StatusCode::SERVICE_UNAVAILABLE, "the server is being stopped"),
        Err(_) => {
            let pending = vec!["the reload is still running; the server's log will report its result".to_owned()];
            let reloaded = ReloadResult { left: pending, ..ReloadResult::default() };
            json_response(StatusCode::ACCEPTED, &reloaded)
        }
    }
}

/// Has the VM's disks perform a step of a move. A step that the guest does not wait for bypasses the VM's main
/// thread, which could execute no other command meanwhile.
async fn apply_move_step(request: Request<Incoming>, subject: &Subject) -> HttpResponse {
    let MoveRequest { step } = match parse_body(request, "{\"step\":\"settle\"}").await {
        Ok(body) => body,
        Err(unfit) => return request_error_response(unfit),
    };
    let of_disk = match step {
        MoveStep::Settle => Some(DiskAction::FlushCache),
        MoveStep::Stay => Some(DiskAction::RestoreCache),
        _ => None,
    };
    let (reply, told) = oneshot::channel();
    if let Some(step) = of_disk {
        let disks = subject.disks();
        tokio::spawn(async move {
            let mut result = Ok(MoveStepResult { done: true });
            for disk in disks {
                if let Some(Err(error)) = disk.change(DiskChange::Move(step)).await {
                    result = Err(error.to_string());
                }
            }
            let _ = reply.send(result);
        });
    } else if !subject.request_move(step, reply) {
        return error_response(StatusCode::CONFLICT, "this server serves no VM whose disks can move");
    }
    match timeout(RELOAD_REPLY_TIMEOUT, told).await {
        Ok(Ok(Ok(MoveStepResult { done: true }))) => ok_response(&MoveStepResult { done: true }),
        Ok(Ok(Err(error))) => error_response(StatusCode::CONFLICT, error),
        // The step continues, or the server ends, and the client must ask the next one.
        Ok(Ok(Ok(_)) | Err(_)) | Err(_) => json_response(StatusCode::ACCEPTED, &MoveStepResult { done: false }),
    }
}

/// Streams events: those in the buffer after the client's last one, and all new ones.
fn subscribe_events(headers: &HeaderMap, asked: &Arc<ConnectionState>) -> HttpResponse {
    let Ok(slot) = Arc::clone(&asked.subscriber_slots).try_acquire_owned() else {
        return error_response(StatusCode::SERVICE_UNAVAILABLE, "too many event subscribers; close one of them");
    };
    asked.set_request_kind(EVENT_STREAM);
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(stream_events(events(), last_event_number(headers), sender, Arc::clone(asked), slot));
    event_stream(receiver)
}

/// Returns the number of the last event that a client received from this process.
fn last_event_number(headers: &HeaderMap) -> u64 {
    let last = headers.get(LAST_EVENT_ID).and_then(|last| last.to_str().ok());
    let of_process = last.and_then(|last| last.strip_prefix(&id_prefix()));
    of_process.and_then(|number| number.parse().ok()).unwrap_or_default()
}

/// Returns the prefix of this process's event IDs.
fn id_prefix() -> String {
    format!("{}-", std::process::id())
}

async fn stream_events(
    events: &EventBuffer,
    mut last: u64,
    client: mpsc::Sender<Bytes>,
    asked: Arc<ConnectionState>,
    _room: OwnedSemaphorePermit,
) {
    let mut newest = events.subscribe();
    let prefix = id_prefix();
    loop {
        newest.mark_unchanged();
        let mut text = String::new();
        for event in events.after(last) {
            last = event.number;
            text.push_str(&format!("id: {prefix}{last}\ndata: {}\n\n", json!(*event)));
        }
        if text.is_empty() && timeout(KEEPALIVE_INTERVAL, newest.changed()).await.is_ok() {
            continue;
        }
        if text.is_empty() {
            text.push_str(":\n\n");
        }
        if !matches!(timeout(CLIENT_STALL_TIMEOUT, client.send(text.into())).await, Ok(Ok(()))) {
            asked.stream_stalled.notify_one();
            return;
        }
    }
}

fn disk_closing_response() -> HttpResponse {
    error_response(StatusCode::SERVICE_UNAVAILABLE, "the disk is being closed")
}

/// Returns the answer of a disk's thread, or the error that it does not answer.
async fn with_disk_timeout<T>(reply: impl Future<Output = Option<T>>) -> Result<T, HttpResponse> {
    match timeout(DISK_REPLY_TIMEOUT, reply).await {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => Err(disk_closing_response()),
        Err(_) => Err(error_response(
            StatusCode::SERVICE_UNAVAILABLE,
            format_args!(
                "the disk's thread has not answered for {} s; is its storage stuck?",
                DISK_REPLY_TIMEOUT.as_secs()
            ),
        )),
    }
}

fn method_not_allowed(path: &str, method: &Method, allowed: &'static str) -> HttpResponse {
    let mut refused = error_response(
        StatusCode::METHOD_NOT_ALLOWED,
        format_args!("{path} does not support {method}, only {}", allowed.replace(", ", " and ")),
    );
    refused.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    refused
}

fn error_response(status: StatusCode, why: impl std::fmt::Display) -> HttpResponse {
    json_response(status, &ErrorBody { error: why.to_string() })
}

fn ok_response(what: &impl Serialize) -> HttpResponse {
    json_response(StatusCode::OK, what)
}

fn json_response(status: StatusCode, what: &impl Serialize) -> HttpResponse {
    full_response(status, "application/json", format!("{}\n", json!(what)))
}

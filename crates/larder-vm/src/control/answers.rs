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

use super::events::{Events, events};
use super::memory::{Detached, MemoryPatch};
use super::migration::{Cancelling, MigrationInquiry, MigrationPatch};
use super::openapi;
use super::response::{Answer, event_stream, whole};
use super::state::{Disks, Failure};
use super::subject::Subject;
use super::wishes::{CacheReplacement, DiskPatch, HotRanges, MoveWish, Reloaded, Unfit};
use super::{
    CANCEL_DETACH_PATH, CANCEL_PATH, DETACH_PATH, DISKS_PATH, EVENTS_PATH, MEMORY_PATH, MIGRATION_PATH, MOVE_PATH,
    OPENAPI_PATH, RELOAD_PATH, SERVER_PATH,
};
use crate::disk::{CacheWork, DiskChange, DiskInquiry, DiskMove, ranges_of, text_of};
use crate::memory::MemoryInquiry;
use crate::read_group::READ_GROUP;
use crate::vm::{Moved, VmMove};

/// Longest time that a disk may take to report its state.
const DISK_TIME_MAX: Duration = Duration::from_secs(5);

/// Longest wait for a change, before the answer says that it continues.
const WORK_TIME_MAX: Duration = Duration::from_secs(2);

/// Longest wait for a reload, which may make several changes.
const RELOAD_TIME_MAX: Duration = Duration::from_secs(8);

/// Maximum length of a request's body, in bytes.
const BODY_BYTES_MAX: usize = 4 << 10;

/// Maximum length of a body with hot ranges, in bytes: that of a message between two movers.
const HOT_BYTES_MAX: usize = 64 << 10;

/// Largest integer up to which every integer is exact as a floating-point number.
const WHOLE_MAX: f64 = (1u64 << 53) as f64;

/// Idle time of an event stream after which a keep-alive comment is sent.
const QUIET: Duration = Duration::from_secs(15);

/// Longest time for which a subscriber may read nothing.
const STUCK: Duration = Duration::from_secs(30);

/// Header with which a client that reconnects gives the last event that it received.
const LAST_EVENT_ID: &str = "last-event-id";

/// Requests of one connection so far.
pub(super) struct Asked {
    what: AtomicU8,
    /// Limit on the number of event subscribers.
    listeners: Arc<Semaphore>,
    /// The client may change something, not only read.
    may_change: bool,
    stuck: Notify,
}

const NOTHING: u8 = 0;
const SOMETHING: u8 = 1;
const EVENTS: u8 = 2;

impl Asked {
    pub(super) fn new(listeners: Arc<Semaphore>, may_change: bool) -> Self {
        Self {
            what: AtomicU8::new(NOTHING),
            listeners,
            may_change,
            stuck: Notify::new(),
        }
    }

    pub(super) fn is_silent(&self) -> bool {
        self.what.load(Ordering::Relaxed) == NOTHING
    }

    pub(super) fn listens(&self) -> bool {
        self.what.load(Ordering::Relaxed) == EVENTS
    }

    /// Completes when an event subscriber has stopped reading, or its stream has ended.
    pub(super) async fn is_stuck(&self) {
        self.stuck.notified().await;
    }

    fn has_asked(&self, what: u8) {
        self.what.store(what, Ordering::Relaxed);
    }
}

/// A resource of the API.
enum Resource {
    Server,
    OpenApi,
    Events,
    Reload,
    Move,
    Memory(Option<MemoryInquiry>),
    Detach(Option<MemoryInquiry>),
    CancelDetach(Option<MemoryInquiry>),
    Migration(Option<MigrationInquiry>),
    Cancel(Option<MigrationInquiry>),
    Disks,
    Disk(DiskInquiry),
    Flush(DiskInquiry),
    Replace(DiskInquiry),
    Hot(DiskInquiry),
}

impl Resource {
    fn at(path: &str, subject: &Subject) -> Option<Self> {
        match path {
            SERVER_PATH => return Some(Self::Server),
            OPENAPI_PATH => return Some(Self::OpenApi),
            EVENTS_PATH => return Some(Self::Events),
            RELOAD_PATH => return Some(Self::Reload),
            MOVE_PATH => return Some(Self::Move),
            DISKS_PATH => return Some(Self::Disks),
            MEMORY_PATH => return Some(Self::Memory(subject.memory_of())),
            DETACH_PATH => return Some(Self::Detach(subject.memory_of())),
            CANCEL_DETACH_PATH => return Some(Self::CancelDetach(subject.memory_of())),
            MIGRATION_PATH => return Some(Self::Migration(subject.migration_of())),
            CANCEL_PATH => return Some(Self::Cancel(subject.migration_of())),
            _ => {}
        }
        let of_disk = path.strip_prefix(DISKS_PATH)?.strip_prefix('/')?;
        let (disk, what) = of_disk.split_once('/').unwrap_or((of_disk, ""));
        let disk = subject.find(disk)?;
        match what {
            "" if !of_disk.ends_with('/') => Some(Self::Disk(disk)),
            "cache/flush" => Some(Self::Flush(disk)),
            "cache/replace" => Some(Self::Replace(disk)),
            "hot" => Some(Self::Hot(disk)),
            _ => None,
        }
    }

    /// Returns the methods that the resource supports.
    fn methods(&self) -> &'static str {
        match self {
            Self::Server | Self::OpenApi | Self::Events | Self::Disks => "GET, HEAD",
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

pub(super) async fn answer(request: Request<Incoming>, subject: &Subject, asked: &Arc<Asked>) -> Answer {
    asked.has_asked(SOMETHING);
    // RFC 9112, 3.2.
    if request.version() == Version::HTTP_11 && request.headers().get_all(HOST).iter().count() != 1 {
        return failure(
            StatusCode::BAD_REQUEST,
            "an HTTP/1.1 request has one Host header; any name will do",
        );
    }
    if !asked.may_change && !matches!(*request.method(), Method::GET | Method::HEAD) {
        // A client that is still sending when the connection is closed may never see the answer.
        let _ = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
        return failure(
            StatusCode::FORBIDDEN,
            format_args!(
                "this client may only read: a change requires root, the server's user, or the owner or group of the \
                 socket (control-owner, control-group in the VM's file); members of {READ_GROUP} may only read"
            ),
        );
    }
    let path = request.uri().path().to_owned();
    let Some(resource) = Resource::at(&path, subject) else {
        return failure(StatusCode::NOT_FOUND, not_found(&path, subject));
    };
    let allowed = resource.methods();
    if !allowed.split(", ").any(|method| request.method() == method) {
        return not_so(&path, request.method(), allowed);
    }
    match resource {
        Resource::Server => found(&subject.state()),
        Resource::OpenApi => found(&openapi::document()),
        Resource::Events if request.method() == Method::HEAD => event_stream(mpsc::channel(1).1),
        Resource::Events => listen(request.headers(), asked),
        Resource::Reload => reload(request, subject).await,
        Resource::Move => move_on(request, subject).await,
        Resource::Disks => disks(&subject.disks()).await,
        Resource::Disk(disk) if request.method() == Method::PATCH => patch(request, &disk).await,
        Resource::Disk(disk) => match in_time(disk.state()).await {
            Ok(state) => found(&state),
            Err(late) => late,
        },
        Resource::Memory(None)
        | Resource::Detach(None)
        | Resource::CancelDetach(None)
        | Resource::Migration(None)
        | Resource::Cancel(None) => {
            // A client that is still sending when the connection is closed may never see the answer.
            let _ = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
            failure(StatusCode::NOT_FOUND, not_found(&path, subject))
        }
        Resource::Migration(Some(migration)) if request.method() == Method::PATCH => {
            limit_migration(request, &migration).await
        }
        Resource::Migration(Some(migration)) => found(&migration.state()),
        Resource::Cancel(Some(migration)) => {
            migration.cancel();
            json_answer(StatusCode::ACCEPTED, &Cancelling { cancelling: true })
        }
        Resource::Memory(Some(memory)) if request.method() == Method::PATCH => limit_memory(request, &memory).await,
        Resource::Memory(Some(memory)) => match timeout(DISK_TIME_MAX, memory.state()).await {
            Ok(Some(state)) => found(&state),
            Ok(None) => memory_is_over(),
            Err(_) => memory_is_late(),
        },
        Resource::Detach(Some(memory)) => detach_memory(&memory).await,
        Resource::CancelDetach(Some(memory)) => match timeout(DISK_TIME_MAX, memory.cancel_detach()).await {
            Ok(Some(true)) => json_answer(StatusCode::ACCEPTED, &Cancelling { cancelling: true }),
            Ok(Some(false)) => failure(StatusCode::CONFLICT, "no detach is running"),
            Ok(None) => memory_is_over(),
            Err(_) => memory_is_late(),
        },
        Resource::Flush(disk) => work(&disk, DiskChange::Cache(CacheWork::Flush)).await,
        Resource::Replace(disk) => replace(request, &disk).await,
        Resource::Hot(disk) if request.method() == Method::POST => warm(request, &disk).await,
        Resource::Hot(disk) => match timeout(RELOAD_TIME_MAX, disk.hot()).await {
            Ok(Some(ranges)) => found(&HotRanges {
                ranges: text_of(&ranges),
            }),
            Ok(None) => being_closed(),
            Err(_) => failure(
                StatusCode::SERVICE_UNAVAILABLE,
                "the disk's thread has not returned the hot ranges in time",
            ),
        },
    }
}

fn not_found(path: &str, subject: &Subject) -> String {
    let called = path.strip_prefix(DISKS_PATH).and_then(|rest| rest.strip_prefix('/'));
    let called = called.map(|rest| rest.split('/').next().unwrap_or_default());
    match called {
        Some(disk) if subject.find(disk).is_none() => {
            let all = subject.disks();
            let known = all.iter().enumerate().map(|(place, disk)| match disk.name() {
                Some(name) => name.to_owned(),
                None => place.to_string(),
            });
            let known: Vec<String> = known.collect();
            format!("there is no disk '{disk}'; the disks are: {}", known.join(", "))
        }
        _ if subject.memory_of().is_some() => {
            format!("there is no {path}; there is {MEMORY_PATH}, and what {OPENAPI_PATH} describes")
        }
        _ if subject.migration_of().is_some() => {
            format!("there is no {path}; there is {MIGRATION_PATH}, and what {OPENAPI_PATH} describes")
        }
        _ => format!("there is no {path}; there is {DISKS_PATH}, and what {OPENAPI_PATH} describes"),
    }
}

async fn disks(all: &[DiskInquiry]) -> Answer {
    let mut told = Disks { disks: Vec::new() };
    for disk in all {
        match in_time(disk.state()).await {
            Ok(state) => told.disks.push(state),
            Err(late) => return late,
        }
    }
    found(&told)
}

async fn patch(request: Request<Incoming>, disk: &DiskInquiry) -> Answer {
    let body: Result<DiskPatch, Unfit> = body_of(request, "{\"limits\":{\"iops-total\":1000}}").await;
    match body.and_then(|patch| patch.settings()) {
        Ok(settings) => work(disk, DiskChange::Settings(settings)).await,
        Err(unfit) => refuse(unfit),
    }
}

async fn limit_memory(request: Request<Incoming>, memory: &MemoryInquiry) -> Answer {
    let patch: MemoryPatch = match body_of(request, "{\"budget\":1073741824}").await {
        Ok(patch) => patch,
        Err(unfit) => return refuse(unfit),
    };
    match timeout(DISK_TIME_MAX, memory.limit(patch.limits())).await {
        Ok(Some(Ok(state))) => found(&state),
        Ok(Some(Err(error))) => failure(StatusCode::CONFLICT, error),
        Ok(None) => memory_is_over(),
        Err(_) => memory_is_late(),
    }
}

async fn limit_migration(request: Request<Incoming>, migration: &MigrationInquiry) -> Answer {
    let patch: MigrationPatch = match body_of(request, "{\"bandwidth\":52428800}").await {
        Ok(patch) => patch,
        Err(unfit) => return refuse(unfit),
    };
    if let Err(why) = patch.check() {
        return failure(StatusCode::BAD_REQUEST, why);
    }
    match migration.limit(&patch) {
        Ok(()) => found(&migration.state()),
        Err(why) => failure(StatusCode::CONFLICT, why),
    }
}

async fn detach_memory(memory: &MemoryInquiry) -> Answer {
    // The detach continues even if the client stops waiting.
    let detaching = memory.clone();
    let detaching = tokio::spawn(async move { detaching.detach().await });
    match timeout(WORK_TIME_MAX, detaching).await {
        Ok(Ok(Some(Ok(())))) => found(&Detached { detached: true }),
        Ok(Ok(Some(Err(error)))) => failure(StatusCode::CONFLICT, error),
        Ok(_) => memory_is_over(),
        Err(_) => json_answer(StatusCode::ACCEPTED, &Detached { detached: false }),
    }
}

fn memory_is_over() -> Answer {
    failure(
        StatusCode::SERVICE_UNAVAILABLE,
        "the memory is no longer managed: Larder has detached from it, or its process has ended",
    )
}

fn memory_is_late() -> Answer {
    failure(
        StatusCode::SERVICE_UNAVAILABLE,
        format_args!("the memory's thread has not answered for {} s", DISK_TIME_MAX.as_secs()),
    )
}

async fn replace(request: Request<Incoming>, disk: &DiskInquiry) -> Answer {
    let body: Result<CacheReplacement, Unfit> = body_of(request, "{\"with\":\"/ssd/new.cache\"}").await;
    match body.and_then(|by| by.replacement()) {
        Ok(by) => work(disk, DiskChange::Cache(CacheWork::Replace(by))).await,
        Err(unfit) => refuse(unfit),
    }
}

async fn warm(request: Request<Incoming>, disk: &DiskInquiry) -> Answer {
    let body: Result<HotRanges, Unfit> = body_within(request, HOT_BYTES_MAX, "{\"ranges\":\"17+3,4+1\"}").await;
    match body.and_then(|hot| Ok(ranges_of(&hot.ranges)?)) {
        Ok(ranges) => work(disk, DiskChange::Warm(ranges)).await,
        Err(unfit) => refuse(unfit),
    }
}

fn refuse(unfit: Unfit) -> Answer {
    match unfit {
        Unfit::Wrong(why) => failure(StatusCode::BAD_REQUEST, why),
        Unfit::Senseless(why) => failure(StatusCode::CONFLICT, why),
    }
}

/// Parses the body; an error compares it with `example`.
async fn body_of<T: DeserializeOwned>(request: Request<Incoming>, example: &str) -> Result<T, Unfit> {
    body_within(request, BODY_BYTES_MAX, example).await
}

async fn body_within<T: DeserializeOwned>(
    request: Request<Incoming>,
    bytes_max: usize,
    example: &str,
) -> Result<T, Unfit> {
    let not_like = |why: String| Unfit::Wrong(format!("the body must be JSON like {example}: {why}"));
    let body = Limited::new(request.into_body(), bytes_max).collect().await;
    let body = body.map_err(|error| not_like(error.to_string()))?.to_bytes();
    let read = |error: serde_json::Error| not_like(error.to_string());
    let mut said: Value = serde_json::from_slice(&body).map_err(read)?;
    if !is_plain(&mut said) {
        // serde would deserialise the list as a struct without field names.
        return Err(not_like("it contains a list".to_owned()));
    }
    T::deserialize(said).map_err(read)
}

/// Returns whether the value has no list. Also converts whole numbers with a decimal point to integers.
fn is_plain(value: &mut Value) -> bool {
    match value {
        Value::Array(_) => false,
        Value::Object(fields) => fields.values_mut().all(is_plain),
        Value::Number(number) => {
            // All numbers of the API are integers, such as a number of bytes, and are exact in this range.
            let whole = number.as_f64().filter(|it| number.is_f64() && it.fract() == 0.0);
            if let Some(whole) = whole.filter(|it| (0.0..=WHOLE_MAX).contains(it)) {
                *value = (whole as u64).into();
            }
            true
        }
        _ => true,
    }
}

/// Changes a disk. A change that takes long continues after the answer.
async fn work(disk: &DiskInquiry, change: DiskChange) -> Answer {
    match timeout(WORK_TIME_MAX, disk.change(change)).await {
        Ok(Some(Ok(state))) => found(&state),
        Ok(Some(Err(error))) => failure(StatusCode::CONFLICT, error),
        Ok(None) => being_closed(),
        Err(_) => match in_time(disk.state()).await {
            Ok(state) => json_answer(StatusCode::ACCEPTED, &state),
            Err(late) => late,
        },
    }
}

async fn reload(request: Request<Incoming>, subject: &Subject) -> Answer {
    if request.body().size_hint().exact() != Some(0) {
        return failure(
            StatusCode::BAD_REQUEST,
            "the server reads the VM's file itself: send no body",
        );
    }
    let (reply, told) = oneshot::channel();
    if !subject.reload(reply) {
        return failure(
            StatusCode::CONFLICT,
            "there is no file to reload: this server was configured on its command line",
        );
    }
    match timeout(RELOAD_TIME_MAX, told).await {
        Ok(Ok(Ok(reloaded))) => found(&reloaded),
        Ok(Ok(Err(error))) => failure(StatusCode::CONFLICT, error),
        Ok(Err(_)) => failure(StatusCode::SERVICE_UNAVAILABLE, "the server is being stopped"),
        Err(_) => {
            let left = vec!["the reload is still running; the server's log will report its result".to_owned()];
            let reloaded = Reloaded {
                left,
                ..Reloaded::default()
            };
            json_answer(StatusCode::ACCEPTED, &reloaded)
        }
    }
}

/// Has the VM's disks perform a step of a move. A step that the guest does not wait for bypasses the VM's main
/// thread, which could execute no other command meanwhile.
async fn move_on(request: Request<Incoming>, subject: &Subject) -> Answer {
    let MoveWish { step } = match body_of(request, "{\"step\":\"settle\"}").await {
        Ok(wish) => wish,
        Err(unfit) => return refuse(unfit),
    };
    let of_disk = match step {
        VmMove::Settle => Some(DiskMove::Settle),
        VmMove::Stay => Some(DiskMove::Stay),
        _ => None,
    };
    let (reply, told) = oneshot::channel();
    if let Some(step) = of_disk {
        let disks = subject.disks();
        tokio::spawn(async move {
            let mut result = Ok(Moved { done: true });
            for disk in disks {
                if let Some(Err(error)) = disk.change(DiskChange::Move(step)).await {
                    result = Err(error.to_string());
                }
            }
            let _ = reply.send(result);
        });
    } else if !subject.move_on(step, reply) {
        return failure(StatusCode::CONFLICT, "this server serves no VM whose disks can move");
    }
    match timeout(RELOAD_TIME_MAX, told).await {
        Ok(Ok(Ok(Moved { done: true }))) => found(&Moved { done: true }),
        Ok(Ok(Err(error))) => failure(StatusCode::CONFLICT, error),
        // The step continues, or the server ends, and the client must ask the next one.
        Ok(Ok(Ok(_)) | Err(_)) | Err(_) => json_answer(StatusCode::ACCEPTED, &Moved { done: false }),
    }
}

/// Streams events: those in the buffer after the client's last one, and all new ones.
fn listen(headers: &HeaderMap, asked: &Arc<Asked>) -> Answer {
    let Ok(room) = Arc::clone(&asked.listeners).try_acquire_owned() else {
        return failure(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many event subscribers; close one of them",
        );
    };
    asked.has_asked(EVENTS);
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(tell(events(), last_told(headers), sender, Arc::clone(asked), room));
    event_stream(receiver)
}

/// Returns the number of the last event that a client received from this process.
fn last_told(headers: &HeaderMap) -> u64 {
    let last = headers.get(LAST_EVENT_ID).and_then(|last| last.to_str().ok());
    let of_process = last.and_then(|last| last.strip_prefix(&id_prefix()));
    of_process.and_then(|number| number.parse().ok()).unwrap_or_default()
}

/// Returns the prefix of this process's event IDs.
fn id_prefix() -> String {
    format!("{}-", std::process::id())
}

async fn tell(
    events: &Events,
    mut last: u64,
    client: mpsc::Sender<Bytes>,
    asked: Arc<Asked>,
    _room: OwnedSemaphorePermit,
) {
    let mut news = events.listen();
    let prefix = id_prefix();
    loop {
        news.mark_unchanged();
        let mut text = String::new();
        for event in events.after(last) {
            last = event.number;
            text.push_str(&format!("id: {prefix}{last}\ndata: {}\n\n", json!(*event)));
        }
        if text.is_empty() && timeout(QUIET, news.changed()).await.is_ok() {
            continue;
        }
        if text.is_empty() {
            text.push_str(":\n\n");
        }
        if !matches!(timeout(STUCK, client.send(text.into())).await, Ok(Ok(()))) {
            asked.stuck.notify_one();
            return;
        }
    }
}

fn being_closed() -> Answer {
    failure(StatusCode::SERVICE_UNAVAILABLE, "the disk is being closed")
}

/// Returns the answer of a disk's thread, or the error that it does not answer.
async fn in_time<T>(asked: impl Future<Output = Option<T>>) -> Result<T, Answer> {
    match timeout(DISK_TIME_MAX, asked).await {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => Err(being_closed()),
        Err(_) => Err(failure(
            StatusCode::SERVICE_UNAVAILABLE,
            format_args!(
                "the disk's thread has not answered for {} s; is its storage stuck?",
                DISK_TIME_MAX.as_secs()
            ),
        )),
    }
}

fn not_so(path: &str, method: &Method, allowed: &'static str) -> Answer {
    let mut refused = failure(
        StatusCode::METHOD_NOT_ALLOWED,
        format_args!(
            "{path} does not support {method}, only {}",
            allowed.replace(", ", " and ")
        ),
    );
    refused.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    refused
}

fn failure(status: StatusCode, why: impl std::fmt::Display) -> Answer {
    json_answer(status, &Failure { error: why.to_string() })
}

fn found(what: &impl Serialize) -> Answer {
    json_answer(StatusCode::OK, what)
}

fn json_answer(status: StatusCode, what: &impl Serialize) -> Answer {
    whole(status, "application/json", format!("{}\n", json!(what)))
}

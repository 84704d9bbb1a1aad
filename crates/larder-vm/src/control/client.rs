//! The client side of the control socket.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use larder_block::ByteLen;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use super::memory::{DetachResult, MemoryPatch, MemoryState};
use super::migration::{CancelResult, MigrationPatch, MigrationState};
use super::requests::{CacheReplacement, DiskPatch, HotRanges, MoveRequest, ReloadResult};
use super::state::{DiskList, DiskState, ServerState};
use super::trace::Traces;
use super::{
    CANCEL_DETACH_PATH, CANCEL_MIGRATION_PATH, DETACH_PATH, DISKS_PATH, MEMORY_PATH, MIGRATION_PATH, MOVE_PATH,
    RELOAD_PATH, SERVER_PATH, TRACE_PATH, disk_path, flush_cache_path, hot_ranges_path, replace_cache_path,
};
use crate::disk::CacheOperation;
use crate::image::absolute;
use crate::read_group::READ_GROUP;
use crate::vm::{MoveStep, MoveStepResult, find};

/// Longest wait for an answer.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of attempts, with this pause in between: a server that has too many clients closes new connections.
const ATTEMPTS_MAX: u32 = 20;
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Maximum length of an answer, in bytes.
const RESPONSE_BYTES_MAX: usize = 16 << 20;

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ControlClientError {
    #[error(
        "there is no {}: give the path that the server was given with --control; a server that has ended has removed it",
        path.display()
    )]
    Missing { path: PathBuf },
    #[error(
        "no process listens on {}: its server was killed; the next server with this --control replaces the socket",
        path.display()
    )]
    NoListener { path: PathBuf },
    #[error("{} is not a socket; give the path that the server was given with --control", path.display())]
    NotASocket { path: PathBuf },
    #[error(
        "you may not connect to {}: only the user who runs the server, root, and members of the group {READ_GROUP} can; try sudo",
        path.display()
    )]
    Permission { path: PathBuf },
    #[error(
        "the process that listens on {} has closed the connection without an answer, {ATTEMPTS_MAX} times: it has too many clients, so try again; or it is not a control socket of Larder",
        path.display()
    )]
    Busy { path: PathBuf },
    #[error("cannot send a request to {}: {source}", path.display())]
    Os { path: PathBuf, source: io::Error },
    #[error(
        "{} is not a control socket of Larder: {why}; give the path that the server was given with --control",
        path.display()
    )]
    NotLarder { path: PathBuf, why: String },
    #[error(
        "no answer from {} within {} s: its server is stopped or hangs, or it is not a control socket",
        path.display(), RESPONSE_TIMEOUT.as_secs()
    )]
    Timeout { path: PathBuf },
    #[error(
        "the server at {} does not store the events of its disks, because it runs an older version of Larder than this one: restart it with this version; until then, its log has the most important events",
        path.display()
    )]
    NoTrace { path: PathBuf },
    #[error("{error} (reported by the server at {})", path.display())]
    Refused { path: PathBuf, error: String },
}

/// Requests the state of the disks from the control socket `path`. Returns the answer as JSON and in parsed form.
///
/// # Errors
/// See [`ControlClientError`].
pub fn fetch_disks(path: &Path) -> Result<(Value, DiskList), ControlClientError> {
    request_with_timeout(path, &ControlQuery::FetchDisks)
}

/// Requests the state of the server itself from the control socket `path`.
///
/// # Errors
/// See [`ControlClientError`].
pub fn fetch_server(path: &Path) -> Result<ServerState, ControlClientError> {
    Ok(request_with_timeout(path, &ControlQuery::FetchServer)?.1)
}

/// Requests the last events of the disks from the control socket `path`, which answers even while a disk hangs. Returns
/// the answer as JSON and in parsed form.
///
/// # Errors
/// See [`ControlClientError`].
pub fn fetch_trace(path: &Path) -> Result<(Value, Traces), ControlClientError> {
    request_with_timeout(path, &ControlQuery::FetchTrace)
}

/// A change to a disk.
#[derive(Clone, Debug)]
pub enum DiskChangeRequest {
    /// Change settings.
    Settings(DiskPatch),
    /// Perform an operation on the cache.
    Cache(CacheOperation),
}

/// Changes a disk, given by its name or by its index in the answer to [`fetch_disks`]; returns its state afterwards.
/// A long change may still be running then: see [`CacheState::flush`](super::state::CacheState).
///
/// # Errors
/// See [`ControlClientError`].
pub fn change_disk(path: &Path, disk: &str, change: DiskChangeRequest) -> Result<DiskState, ControlClientError> {
    Ok(request_with_timeout(path, &ControlQuery::ChangeDisk(disk.to_owned(), change))?.1)
}

/// Has the server reload the VM's file. Returns the result as JSON and in parsed form.
///
/// # Errors
/// See [`ControlClientError`].
pub fn reload(path: &Path) -> Result<(Value, ReloadResult), ControlClientError> {
    request_with_timeout(path, &ControlQuery::Reload)
}

/// Requests the state of the managed memory from the control socket `path`. Returns the answer as JSON and in parsed
/// form.
///
/// # Errors
/// See [`ControlClientError`].
pub fn fetch_memory(path: &Path) -> Result<(Value, MemoryState), ControlClientError> {
    request_with_timeout(path, &ControlQuery::FetchMemory)
}

/// Changes the limits of the managed memory; returns its state afterwards.
///
/// # Errors
/// See [`ControlClientError`].
pub fn limit_memory(path: &Path, patch: MemoryPatch) -> Result<MemoryState, ControlClientError> {
    Ok(request_with_timeout(path, &ControlQuery::LimitMemory(patch))?.1)
}

/// Has the server detach from the memory that it manages.
///
/// # Errors
/// See [`ControlClientError`].
pub fn detach_memory(path: &Path) -> Result<DetachResult, ControlClientError> {
    Ok(request_with_timeout(path, &ControlQuery::DetachMemory)?.1)
}

/// Cancels a running detach; the memory remains managed, within its budget.
///
/// # Errors
/// See [`ControlClientError`].
pub fn cancel_detach(path: &Path) -> Result<CancelResult, ControlClientError> {
    Ok(request_with_timeout(path, &ControlQuery::CancelDetach)?.1)
}

/// Has the VM's disks perform a step of a move; returns whether it is complete. Otherwise it continues, and must be
/// requested again.
///
/// # Errors
/// See [`ControlClientError`].
pub fn request_move_step(path: &Path, step: MoveStep) -> Result<MoveStepResult, ControlClientError> {
    Ok(request_with_timeout(path, &ControlQuery::MoveStep(step))?.1)
}

/// Requests the hot ranges of a disk, in the format of [`crate::disk::format_hot_ranges`].
///
/// # Errors
/// See [`ControlClientError`].
pub fn fetch_hot_ranges(path: &Path, disk: &str) -> Result<String, ControlClientError> {
    let hot: HotRanges = request_with_timeout(path, &ControlQuery::FetchHotRanges(disk.to_owned()))?.1;
    Ok(hot.ranges)
}

/// Warms a disk's cache with ranges that another host's server returned by [`fetch_hot_ranges`].
///
/// # Errors
/// See [`ControlClientError`].
pub fn warm_disk(path: &Path, disk: &str, ranges: &str) -> Result<DiskState, ControlClientError> {
    Ok(request_with_timeout(path, &ControlQuery::WarmDisk(disk.to_owned(), ranges.to_owned()))?.1)
}

/// Requests the state of the running migration from the control socket `path`. Returns the answer as JSON and in
/// parsed form.
///
/// # Errors
/// See [`ControlClientError`].
pub fn fetch_migration(path: &Path) -> Result<(Value, MigrationState), ControlClientError> {
    request_with_timeout(path, &ControlQuery::FetchMigration)
}

/// Changes the limits of a migration; returns its state afterwards.
///
/// # Errors
/// See [`ControlClientError`].
pub fn limit_migration(path: &Path, patch: MigrationPatch) -> Result<MigrationState, ControlClientError> {
    Ok(request_with_timeout(path, &ControlQuery::LimitMigration(patch))?.1)
}

/// Cancels a migration.
///
/// # Errors
/// See [`ControlClientError`].
pub fn cancel_migration(path: &Path) -> Result<CancelResult, ControlClientError> {
    Ok(request_with_timeout(path, &ControlQuery::CancelMigration)?.1)
}

/// A request.
enum ControlQuery {
    FetchHotRanges(String),
    WarmDisk(String, String),
    MoveStep(MoveStep),
    FetchMigration,
    LimitMigration(MigrationPatch),
    CancelMigration,
    FetchMemory,
    LimitMemory(MemoryPatch),
    DetachMemory,
    CancelDetach,
    FetchServer,
    FetchDisks,
    FetchTrace,
    ChangeDisk(String, DiskChangeRequest),
    Reload,
}

impl ControlQuery {
    fn to_http(&self) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
        let (request, body) = match self {
            Self::FetchServer => (Request::get(SERVER_PATH), Bytes::new()),
            Self::FetchDisks => (Request::get(DISKS_PATH), Bytes::new()),
            Self::FetchTrace => (Request::get(TRACE_PATH), Bytes::new()),
            Self::FetchMigration => (Request::get(MIGRATION_PATH), Bytes::new()),
            Self::LimitMigration(patch) => (Request::patch(MIGRATION_PATH), json!(patch).to_string().into()),
            Self::CancelMigration => (Request::post(CANCEL_MIGRATION_PATH), Bytes::new()),
            Self::FetchMemory => (Request::get(MEMORY_PATH), Bytes::new()),
            Self::LimitMemory(patch) => (Request::patch(MEMORY_PATH), json!(patch).to_string().into()),
            Self::FetchHotRanges(disk) => (Request::get(hot_ranges_path(disk)), Bytes::new()),
            Self::WarmDisk(disk, ranges) => {
                let body = HotRanges { ranges: ranges.clone() };
                (Request::post(hot_ranges_path(disk)), json!(body).to_string().into())
            }
            Self::MoveStep(step) => (Request::post(MOVE_PATH), json!(MoveRequest { step: *step }).to_string().into()),
            Self::DetachMemory => (Request::post(DETACH_PATH), Bytes::new()),
            Self::CancelDetach => (Request::post(CANCEL_DETACH_PATH), Bytes::new()),
            Self::Reload => (Request::post(RELOAD_PATH), Bytes::new()),
            Self::ChangeDisk(disk, DiskChangeRequest::Cache(CacheOperation::Flush)) => {
                (Request::post(flush_cache_path(disk)), Bytes::new())
            }
            Self::ChangeDisk(disk, DiskChangeRequest::Cache(CacheOperation::Replace(by))) => {
                let body = CacheReplacement {
                    // The server may have another working directory.
                    with: by.file.as_ref().map(absolute),
                    size: by.size.map(ByteLen::get),
                    lose_dirty: by.lose_dirty,
                };
                (Request::post(replace_cache_path(disk)), json!(body).to_string().into())
            }
            Self::ChangeDisk(disk, DiskChangeRequest::Settings(patch)) => {
                (Request::patch(disk_path(disk)), json!(patch).to_string().into())
            }
        };
        request.header(HOST, "localhost").body(Full::new(body))
    }
}

/// Sends a request; returns the answer as JSON and in parsed form.
fn request_with_timeout<T: DeserializeOwned>(
    path: &Path,
    request: &ControlQuery,
) -> Result<(Value, T), ControlClientError> {
    let failed = |source| ControlClientError::Os { path: path.to_owned(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().map_err(failed)?;
    let late = || ControlClientError::Timeout { path: path.to_owned() };
    runtime.block_on(async {
        let result = tokio::time::timeout(RESPONSE_TIMEOUT, request_with_retries(path, request)).await;
        result.unwrap_or_else(|_| Err(late()))
    })
}

async fn request_with_retries<T: DeserializeOwned>(
    path: &Path,
    question: &ControlQuery,
) -> Result<(Value, T), ControlClientError> {
    for _ in 1..ATTEMPTS_MAX {
        match request_once(path, question).await {
            Err(ControlClientError::Busy { .. }) => tokio::time::sleep(RETRY_DELAY).await,
            result => return result,
        }
    }
    request_once(path, question).await
}

async fn request_once<T: DeserializeOwned>(
    path: &Path,
    question: &ControlQuery,
) -> Result<(Value, T), ControlClientError> {
    let stream = connect(path).await?;
    let (status, body) = exchange(stream, question).await.map_err(|error| match error {
        ExchangeError::Closed => ControlClientError::Busy { path: path.to_owned() },
        ExchangeError::NotHttp(why) => ControlClientError::NotLarder { path: path.to_owned(), why },
    })?;
    let is_unknown = status == StatusCode::NOT_FOUND;
    parse_response(status, &body).map_err(|problem| match problem {
        ResponseError::Server(_) if is_unknown && matches!(question, ControlQuery::FetchTrace) => {
            ControlClientError::NoTrace { path: path.to_owned() }
        }
        ResponseError::Server(error) => ControlClientError::Refused { path: path.to_owned(), error },
        ResponseError::Malformed(why) => ControlClientError::NotLarder { path: path.to_owned(), why },
    })
}

async fn connect(path: &Path) -> Result<UnixStream, ControlClientError> {
    let path = path.to_owned();
    match UnixStream::connect(&path).await {
        Ok(stream) => Ok(stream),
        Err(source) => Err(match source.kind() {
            io::ErrorKind::NotFound => ControlClientError::Missing { path },
            io::ErrorKind::PermissionDenied => ControlClientError::Permission { path },
            // The server's backlog of connections is full.
            io::ErrorKind::WouldBlock => ControlClientError::Busy { path },
            io::ErrorKind::ConnectionRefused => match find::is_socket(&path) {
                true => ControlClientError::NoListener { path },
                false => ControlClientError::NotASocket { path },
            },
            _ => ControlClientError::Os { path, source },
        }),
    }
}

/// Reason why there was no answer on an open connection.
enum ExchangeError {
    /// The server has closed the connection.
    Closed,
    /// The server does not speak HTTP.
    NotHttp(String),
}

/// Returns whether the other side closed the connection; otherwise the other side does not speak HTTP.
pub fn closed_by_peer(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let is_broken = cause.is_some_and(|cause| {
        matches!(cause.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected)
    });
    is_broken || error.is_incomplete_message() || error.is_canceled() || error.is_closed()
}

impl From<hyper::Error> for ExchangeError {
    fn from(error: hyper::Error) -> Self {
        match closed_by_peer(&error) {
            true => Self::Closed,
            false => Self::NotHttp(error.to_string()),
        }
    }
}

/// Sends the request; returns status and body of the answer.
async fn exchange(stream: UnixStream, question: &ControlQuery) -> Result<(StatusCode, Bytes), ExchangeError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the answer, or when the caller drops this future.
    tokio::spawn(connection);
    let request = question.to_http().map_err(|error| ExchangeError::NotHttp(error.to_string()))?;
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX).collect().await;
    let body = body.map_err(|error| ExchangeError::NotHttp(error.to_string()))?;
    Ok((status, body.to_bytes()))
}

enum ResponseError {
    /// Error message from the server.
    Server(String),
    /// The answer is not one of Larder's.
    Malformed(String),
}

fn parse_response<T: DeserializeOwned>(status: StatusCode, body: &[u8]) -> Result<(Value, T), ResponseError> {
    let unknown = |error: serde_json::Error| ResponseError::Malformed(format!("its answer ({status}): {error}"));
    let value: Value = serde_json::from_slice(body).map_err(unknown)?;
    if let (false, Some(error)) = (status.is_success(), value["error"].as_str()) {
        return Err(ResponseError::Server(error.to_owned()));
    }
    let parsed = T::deserialize(&value).map_err(unknown)?;
    Ok((value, parsed))
}

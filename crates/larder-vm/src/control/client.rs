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

use super::memory::{Detached, MemoryPatch, MemoryState};
use super::migration::{Cancelling, MigrationPatch, MigrationState};
use super::state::{DiskState, Disks, ServerState};
use super::wishes::{CacheReplacement, DiskPatch, HotRanges, MoveWish, Reloaded};
use super::{
    CANCEL_DETACH_PATH, CANCEL_PATH, DETACH_PATH, DISKS_PATH, MEMORY_PATH, MIGRATION_PATH, MOVE_PATH, RELOAD_PATH,
    SERVER_PATH, disk_path, flush_path, hot_path, replace_path,
};
use crate::disk::CacheWork;
use crate::image::absolute;
use crate::read_group::READ_GROUP;
use crate::vm::{Moved, VmMove, find};

/// Longest wait for an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

/// Maximum number of attempts, with this pause in between: a server that has too many clients closes new connections.
const TRIES_MAX: u32 = 20;
const PAUSE: Duration = Duration::from_millis(100);

/// Maximum length of an answer, in bytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FetchError {
    #[error(
        "there is no {}: give the path that the server was given with --control; a server that has ended has removed it",
        path.display()
    )]
    Missing { path: PathBuf },
    #[error(
        "no process listens on {}: its server was killed; the next server with this --control replaces the socket",
        path.display()
    )]
    Dead { path: PathBuf },
    #[error("{} is not a socket; give the path that the server was given with --control", path.display())]
    NotASocket { path: PathBuf },
    #[error(
        "you may not connect to {}: only the user who runs the server, root, and members of the group {READ_GROUP} can; try sudo",
        path.display()
    )]
    Permission { path: PathBuf },
    #[error(
        "the process that listens on {} has closed the connection without an answer, {TRIES_MAX} times: it has too many clients, so try again; or it is not a control socket of Larder",
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
        path.display(), ANSWER_TIME_MAX.as_secs()
    )]
    Late { path: PathBuf },
    #[error("{error} (reported by the server at {})", path.display())]
    Refused { path: PathBuf, error: String },
}

/// Requests the state of the disks from the control socket `path`. Returns the answer as JSON and in parsed form.
///
/// # Errors
/// See [`FetchError`].
pub fn fetch_disks(path: &Path) -> Result<(Value, Disks), FetchError> {
    ask_in_time(path, &Question::Disks)
}

/// Requests the state of the server itself from the control socket `path`.
///
/// # Errors
/// See [`FetchError`].
pub fn fetch_server(path: &Path) -> Result<ServerState, FetchError> {
    Ok(ask_in_time(path, &Question::Server)?.1)
}

/// A change to a disk.
#[derive(Clone, Debug)]
pub enum Change {
    /// Change settings.
    Settings(DiskPatch),
    /// Perform an operation on the cache.
    Cache(CacheWork),
}

/// Changes a disk, given by its name or by its index in the answer to [`fetch_disks`]; returns its state afterwards.
/// A long change may still be running then: see [`CacheState::flush`](super::state::CacheState).
///
/// # Errors
/// See [`FetchError`].
pub fn change_disk(path: &Path, disk: &str, change: Change) -> Result<DiskState, FetchError> {
    Ok(ask_in_time(path, &Question::Change(disk.to_owned(), change))?.1)
}

/// Has the server reload the VM's file. Returns the result as JSON and in parsed form.
///
/// # Errors
/// See [`FetchError`].
pub fn reload(path: &Path) -> Result<(Value, Reloaded), FetchError> {
    ask_in_time(path, &Question::Reload)
}

/// Requests the state of the managed memory from the control socket `path`. Returns the answer as JSON and in parsed
/// form.
///
/// # Errors
/// See [`FetchError`].
pub fn fetch_memory(path: &Path) -> Result<(Value, MemoryState), FetchError> {
    ask_in_time(path, &Question::Memory)
}

/// Changes the limits of the managed memory; returns its state afterwards.
///
/// # Errors
/// See [`FetchError`].
pub fn limit_memory(path: &Path, patch: MemoryPatch) -> Result<MemoryState, FetchError> {
    Ok(ask_in_time(path, &Question::Limit(patch))?.1)
}

/// Has the server detach from the memory that it manages.
///
/// # Errors
/// See [`FetchError`].
pub fn detach_memory(path: &Path) -> Result<Detached, FetchError> {
    Ok(ask_in_time(path, &Question::Detach)?.1)
}

/// Cancels a running detach; the memory remains managed, within its budget.
///
/// # Errors
/// See [`FetchError`].
pub fn cancel_detach(path: &Path) -> Result<Cancelling, FetchError> {
    Ok(ask_in_time(path, &Question::CancelDetach)?.1)
}

/// Has the VM's disks perform a step of a move; returns whether it is complete. Otherwise it continues, and must be
/// requested again.
///
/// # Errors
/// See [`FetchError`].
pub fn move_vm(path: &Path, step: VmMove) -> Result<Moved, FetchError> {
    Ok(ask_in_time(path, &Question::Move(step))?.1)
}

/// Requests the hot ranges of a disk, in the format of [`crate::disk::text_of`].
///
/// # Errors
/// See [`FetchError`].
pub fn fetch_hot(path: &Path, disk: &str) -> Result<String, FetchError> {
    let hot: HotRanges = ask_in_time(path, &Question::Hot(disk.to_owned()))?.1;
    Ok(hot.ranges)
}

/// Warms a disk's cache with ranges that another host's server returned by [`fetch_hot`].
///
/// # Errors
/// See [`FetchError`].
pub fn warm_disk(path: &Path, disk: &str, ranges: &str) -> Result<DiskState, FetchError> {
    Ok(ask_in_time(path, &Question::Warm(disk.to_owned(), ranges.to_owned()))?.1)
}

/// Requests the state of the running migration from the control socket `path`. Returns the answer as JSON and in
/// parsed form.
///
/// # Errors
/// See [`FetchError`].
pub fn fetch_migration(path: &Path) -> Result<(Value, MigrationState), FetchError> {
    ask_in_time(path, &Question::Migration)
}

/// Changes the limits of a migration; returns its state afterwards.
///
/// # Errors
/// See [`FetchError`].
pub fn limit_migration(path: &Path, patch: MigrationPatch) -> Result<MigrationState, FetchError> {
    Ok(ask_in_time(path, &Question::LimitMigration(patch))?.1)
}

/// Cancels a migration.
///
/// # Errors
/// See [`FetchError`].
pub fn cancel_migration(path: &Path) -> Result<Cancelling, FetchError> {
    Ok(ask_in_time(path, &Question::Cancel)?.1)
}

/// A request.
enum Question {
    Hot(String),
    Warm(String, String),
    Move(VmMove),
    Migration,
    LimitMigration(MigrationPatch),
    Cancel,
    Memory,
    Limit(MemoryPatch),
    Detach,
    CancelDetach,
    Server,
    Disks,
    Change(String, Change),
    Reload,
}

impl Question {
    fn request(&self) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
        let (request, body) = match self {
            Self::Server => (Request::get(SERVER_PATH), Bytes::new()),
            Self::Disks => (Request::get(DISKS_PATH), Bytes::new()),
            Self::Migration => (Request::get(MIGRATION_PATH), Bytes::new()),
            Self::LimitMigration(patch) => (Request::patch(MIGRATION_PATH), json!(patch).to_string().into()),
            Self::Cancel => (Request::post(CANCEL_PATH), Bytes::new()),
            Self::Memory => (Request::get(MEMORY_PATH), Bytes::new()),
            Self::Limit(patch) => (Request::patch(MEMORY_PATH), json!(patch).to_string().into()),
            Self::Hot(disk) => (Request::get(hot_path(disk)), Bytes::new()),
            Self::Warm(disk, ranges) => {
                let body = HotRanges { ranges: ranges.clone() };
                (Request::post(hot_path(disk)), json!(body).to_string().into())
            }
            Self::Move(step) => (
                Request::post(MOVE_PATH),
                json!(MoveWish { step: *step }).to_string().into(),
            ),
            Self::Detach => (Request::post(DETACH_PATH), Bytes::new()),
            Self::CancelDetach => (Request::post(CANCEL_DETACH_PATH), Bytes::new()),
            Self::Reload => (Request::post(RELOAD_PATH), Bytes::new()),
            Self::Change(disk, Change::Cache(CacheWork::Flush)) => (Request::post(flush_path(disk)), Bytes::new()),
            Self::Change(disk, Change::Cache(CacheWork::Replace(by))) => {
                let body = CacheReplacement {
                    // The server may have another working directory.
                    with: by.file.as_ref().map(absolute),
                    size: by.size.map(ByteLen::get),
                    lose_dirty: by.lose_dirty,
                };
                (Request::post(replace_path(disk)), json!(body).to_string().into())
            }
            Self::Change(disk, Change::Settings(patch)) => {
                (Request::patch(disk_path(disk)), json!(patch).to_string().into())
            }
        };
        request.header(HOST, "localhost").body(Full::new(body))
    }
}

/// Sends a request; returns the answer as JSON and in parsed form.
fn ask_in_time<T: DeserializeOwned>(path: &Path, question: &Question) -> Result<(Value, T), FetchError> {
    let failed = |source| FetchError::Os {
        path: path.to_owned(),
        source,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(failed)?;
    let late = || FetchError::Late { path: path.to_owned() };
    runtime.block_on(async {
        let asked = tokio::time::timeout(ANSWER_TIME_MAX, ask_repeatedly(path, question)).await;
        asked.unwrap_or_else(|_| Err(late()))
    })
}

async fn ask_repeatedly<T: DeserializeOwned>(path: &Path, question: &Question) -> Result<(Value, T), FetchError> {
    for _ in 1..TRIES_MAX {
        match ask(path, question).await {
            Err(FetchError::Busy { .. }) => tokio::time::sleep(PAUSE).await,
            asked => return asked,
        }
    }
    ask(path, question).await
}

async fn ask<T: DeserializeOwned>(path: &Path, question: &Question) -> Result<(Value, T), FetchError> {
    let stream = connect(path).await?;
    let (status, body) = exchange(stream, question).await.map_err(|silence| match silence {
        Silence::HungUp => FetchError::Busy { path: path.to_owned() },
        Silence::Unknown(why) => FetchError::NotLarder {
            path: path.to_owned(),
            why,
        },
    })?;
    understand(status, &body).map_err(|problem| match problem {
        Problem::Error(error) => FetchError::Refused {
            path: path.to_owned(),
            error,
        },
        Problem::Unknown(why) => FetchError::NotLarder {
            path: path.to_owned(),
            why,
        },
    })
}

async fn connect(path: &Path) -> Result<UnixStream, FetchError> {
    let path = path.to_owned();
    match UnixStream::connect(&path).await {
        Ok(stream) => Ok(stream),
        Err(source) => Err(match source.kind() {
            io::ErrorKind::NotFound => FetchError::Missing { path },
            io::ErrorKind::PermissionDenied => FetchError::Permission { path },
            // The server's backlog of connections is full.
            io::ErrorKind::WouldBlock => FetchError::Busy { path },
            io::ErrorKind::ConnectionRefused => match find::is_socket(&path) {
                true => FetchError::Dead { path },
                false => FetchError::NotASocket { path },
            },
            _ => FetchError::Os { path, source },
        }),
    }
}

/// Reason why there was no answer on an open connection.
enum Silence {
    /// The server has closed the connection.
    HungUp,
    /// The server does not speak HTTP.
    Unknown(String),
}

/// Returns whether the other side closed the connection; otherwise the other side does not speak HTTP.
pub fn is_hung_up(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let is_broken = cause.is_some_and(|cause| {
        matches!(
            cause.kind(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected
        )
    });
    is_broken || error.is_incomplete_message() || error.is_canceled() || error.is_closed()
}

impl From<hyper::Error> for Silence {
    fn from(error: hyper::Error) -> Self {
        match is_hung_up(&error) {
            true => Self::HungUp,
            false => Self::Unknown(error.to_string()),
        }
    }
}

/// Sends the request; returns status and body of the answer.
async fn exchange(stream: UnixStream, question: &Question) -> Result<(StatusCode, Bytes), Silence> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the answer, or when the caller drops this future.
    tokio::spawn(connection);
    let request = question
        .request()
        .map_err(|error| Silence::Unknown(error.to_string()))?;
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| Silence::Unknown(error.to_string()))?;
    Ok((status, body.to_bytes()))
}

enum Problem {
    /// Error message from the server.
    Error(String),
    /// The answer is not one of Larder's.
    Unknown(String),
}

fn understand<T: DeserializeOwned>(status: StatusCode, body: &[u8]) -> Result<(Value, T), Problem> {
    let unknown = |error: serde_json::Error| Problem::Unknown(format!("its answer ({status}): {error}"));
    let value: Value = serde_json::from_slice(body).map_err(unknown)?;
    if let (false, Some(error)) = (status.is_success(), value["error"].as_str()) {
        return Err(Problem::Error(error.to_owned()));
    }
    let known = T::deserialize(&value).map_err(unknown)?;
    Ok((value, known))
}

//! The thread that answers.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HOST, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use larder_block::ByteLen;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::state::{CacheChange, CacheReplacement, Disks};
use super::{DISKS_PATH, cache_path, flush_path, replace_path};
use crate::disk::{CacheWork, DiskInquiry};
use crate::image::{ImageAddress, Replacement, parse_cache_mode};
use crate::listen::{Access, ListenError, SocketFile};

/// Clients that are served at a time. A further one takes the place of the one that has been silent longest; if all have
/// asked, it waits until one has its answer.
const CLIENTS_MAX: usize = 64;

/// How long a client may take for its request.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(5);

/// How long a client may take from its connection to its answer's last byte.
const CLIENT_TIME_MAX: Duration = Duration::from_secs(10);

/// How long a disk may take to say how it is.
const DISK_TIME_MAX: Duration = Duration::from_secs(5);

/// How long something that is to be done is waited for, before it is told that it goes on.
const WORK_TIME_MAX: Duration = Duration::from_secs(2);

/// The longest request line with all headers, in bytes.
const REQUEST_HEAD_BYTES_MAX: usize = 16 << 10;

/// The longest body of a request, in bytes.
const BODY_BYTES_MAX: usize = 4 << 10;

/// The pause after a client that cannot be taken because the process, or the host, is out of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// Why there is no control socket.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ControlError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot start the control socket's thread: {0}")]
    Start(#[from] io::Error),
}

/// What a control server listens on.
pub enum ControlSocket {
    /// Its file goes with it.
    Own(SocketFile),
    /// It stays.
    Inherited(OwnedFd),
}

/// A control socket that answers. It ends when this is dropped, whatever its clients do.
pub struct ControlServer {
    /// Dropped to end the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// Goes last.
    _socket: ControlSocket,
}

impl ControlServer {
    /// Listens on `path`, for this user and root alone, and tells there of `disks`.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing is left behind then.
    pub fn start(path: &Path, disks: Vec<DiskInquiry>) -> Result<Self, ControlError> {
        let file = SocketFile::bind_for(path, Access::OWNER)?;
        Self::start_on(ControlSocket::Own(file), disks)
    }

    /// Tells of `disks` on a socket that is there already.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing is left behind then.
    pub fn start_on(socket: ControlSocket, disks: Vec<DiskInquiry>) -> Result<Self, ControlError> {
        let listener = match &socket {
            ControlSocket::Own(file) => file.descriptor()?,
            ControlSocket::Inherited(listener) => listener.try_clone()?,
        };
        let listener = std::os::unix::net::UnixListener::from(listener);
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            UnixListener::from_std(listener)?
        };
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("larder-control".to_owned())
            .spawn(move || run(&runtime, listener, disks.into(), stopped))?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
            _socket: socket,
        })
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic has been told.
            let _ = thread.join();
        }
    }
}

fn run(runtime: &Runtime, listener: UnixListener, disks: Arc<[DiskInquiry]>, stopped: oneshot::Receiver<()>) {
    runtime.block_on(async {
        tokio::select! {
            () = accept(listener, disks) => {}
            _ = stopped => {}
        }
    });
}

/// A client that is being served.
struct Client {
    task: AbortHandle,
    has_asked: Arc<AtomicBool>,
}

impl Client {
    fn is_silent(&self) -> bool {
        !self.has_asked.load(Ordering::Relaxed)
    }
}

/// Serves whoever comes; dropped to end all.
async fn accept(listener: UnixListener, disks: Arc<[DiskInquiry]>) {
    let mut tasks = JoinSet::new();
    // In the order in which they came.
    let mut clients: Vec<Client> = Vec::with_capacity(CLIENTS_MAX + 1);
    let mut is_told = false;
    loop {
        clients.retain(|client| !client.task.is_finished());
        let may_come = clients.len() < CLIENTS_MAX || clients.iter().any(Client::is_silent);
        let accepted = tokio::select! {
            Some(_) = tasks.join_next() => continue,
            accepted = listener.accept(), if may_come => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                if clients.len() >= CLIENTS_MAX
                    && let Some(oldest) = clients.iter().position(Client::is_silent)
                {
                    clients.remove(oldest).task.abort();
                }
                let has_asked = Arc::new(AtomicBool::new(false));
                let serving = serve(stream, Arc::clone(&disks), Arc::clone(&has_asked));
                let task = tasks.spawn(timeout(CLIENT_TIME_MAX, serving));
                clients.push(Client { task, has_asked });
                is_told = false;
            }
            Err(error) => {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!("the control socket cannot take a client: {error}");
                }
                sleep(PAUSE).await;
            }
        }
    }
}

/// One request, one answer.
async fn serve(client: UnixStream, disks: Arc<[DiskInquiry]>, has_asked: Arc<AtomicBool>) {
    let service = service_fn(|request| {
        has_asked.store(true, Ordering::Relaxed);
        let disks = Arc::clone(&disks);
        async move { Ok::<_, Infallible>(answer(request, &disks).await) }
    });
    let served = http1::Builder::new()
        .keep_alive(false)
        // A client that has said all may close its end, and still wants to know.
        .half_close(true)
        .max_buf_size(REQUEST_HEAD_BYTES_MAX)
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIME_MAX)
        .serve_connection(TokioIo::new(client), service)
        .await;
    if let Err(error) = served {
        tracing::debug!("a client of the control socket: {error}");
    }
}

async fn answer(request: Request<Incoming>, disks: &[DiskInquiry]) -> Response<Full<Bytes>> {
    // RFC 9112, 3.2.
    if request.version() == Version::HTTP_11 && request.headers().get_all(HOST).iter().count() != 1 {
        return failure(
            StatusCode::BAD_REQUEST,
            "an HTTP/1.1 request has one Host header; any name will do",
        );
    }
    let path = request.uri().path().to_owned();
    if path == DISKS_PATH {
        return match *request.method() {
            Method::GET | Method::HEAD => tell(disks).await,
            _ => not_so(&path, "can only be read", "GET, HEAD"),
        };
    }
    let of_cache = (0..disks.len()).find_map(|disk| Some((disk, CachePath::of(&path, disk)?)));
    match of_cache {
        Some((disk, of)) if *request.method() == of.method() => of.answer(request, &disks[disk]).await,
        Some((_, CachePath::Mode)) => not_so(&path, "can only be changed", "PUT"),
        Some(_) => not_so(&path, "can only be done", "POST"),
        None => failure(
            StatusCode::NOT_FOUND,
            format_args!("there is no {path} here; there is {DISKS_PATH}"),
        ),
    }
}

/// What there is of a disk's cache.
#[derive(Clone, Copy)]
enum CachePath {
    Mode,
    Flush,
    Replace,
}

impl CachePath {
    fn of(path: &str, disk: usize) -> Option<Self> {
        let all = [
            (cache_path(disk), Self::Mode),
            (flush_path(disk), Self::Flush),
            (replace_path(disk), Self::Replace),
        ];
        all.into_iter().find(|(known, _)| path == known).map(|(_, of)| of)
    }

    fn method(self) -> Method {
        match self {
            Self::Mode => Method::PUT,
            Self::Flush | Self::Replace => Method::POST,
        }
    }

    async fn answer(self, request: Request<Incoming>, disk: &DiskInquiry) -> Response<Full<Bytes>> {
        let asked = match self {
            Self::Flush => Ok(CacheWork::Flush),
            Self::Mode => mode(request).await,
            Self::Replace => replacement(request).await,
        };
        match asked {
            Ok(asked) => work(disk, asked).await,
            Err(why) => failure(StatusCode::BAD_REQUEST, why),
        }
    }
}

async fn tell(disks: &[DiskInquiry]) -> Response<Full<Bytes>> {
    let mut all = Disks { disks: Vec::new() };
    for disk in disks {
        match in_time(disk.state()).await {
            Ok(state) => all.disks.push(state),
            Err(late) => return late,
        }
    }
    response(StatusCode::OK, format!("{}\n", json!(all)))
}

/// What the body says, or why it is not like `example`.
async fn body_of<T: DeserializeOwned>(request: Request<Incoming>, example: &str) -> Result<T, String> {
    let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
    let said = body
        .map_err(|error| error.to_string())
        .and_then(|body| serde_json::from_slice(&body.to_bytes()).map_err(|error| error.to_string()));
    said.map_err(|error| format!("the body is no {example}: {error}"))
}

async fn mode(request: Request<Incoming>) -> Result<CacheWork, String> {
    let CacheChange { mode } = body_of(request, "{\"mode\":\"wt\"}").await?;
    match parse_cache_mode(&mode) {
        Ok(mode) => Ok(CacheWork::SetMode(mode)),
        Err(error) => Err(format!("mode '{mode}': {error}")),
    }
}

async fn replacement(request: Request<Incoming>) -> Result<CacheWork, String> {
    let CacheReplacement { with, size, lose_dirty } = body_of(request, "{\"with\":\"/ssd/new.cache\"}").await?;
    let file = with.map(|with| with.parse::<ImageAddress>().map_err(|error| format!("with: {error}")));
    let file = file.transpose()?;
    match &file {
        Some(ImageAddress::Path(path)) if !path.is_absolute() => {
            return Err(format!("with '{}': a path begins at the root here", path.display()));
        }
        _ => {}
    }
    Ok(CacheWork::Replace(Replacement {
        file,
        size: size.map(ByteLen::new),
        lose_dirty,
    }))
}

/// Has a disk's cache do something. It may take long, and goes on then.
async fn work(disk: &DiskInquiry, work: CacheWork) -> Response<Full<Bytes>> {
    match timeout(WORK_TIME_MAX, disk.change_cache(work)).await {
        Ok(Some(Ok(state))) => response(StatusCode::OK, format!("{}\n", json!(state))),
        Ok(Some(Err(error))) => failure(StatusCode::CONFLICT, error),
        Ok(None) => being_closed(),
        Err(_) => match in_time(disk.state()).await {
            Ok(state) => response(StatusCode::ACCEPTED, format!("{}\n", json!(state))),
            Err(late) => late,
        },
    }
}

fn being_closed() -> Response<Full<Bytes>> {
    failure(StatusCode::SERVICE_UNAVAILABLE, "the disk is being closed")
}

/// What a disk's thread answers, or what is told of one that does not.
async fn in_time<T>(asked: impl Future<Output = Option<T>>) -> Result<T, Response<Full<Bytes>>> {
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

fn not_so(path: &str, what: &str, allowed: &'static str) -> Response<Full<Bytes>> {
    let mut refused = failure(
        StatusCode::METHOD_NOT_ALLOWED,
        format_args!("{path} {what}: {}", allowed.replace(", ", " or ")),
    );
    refused.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    refused
}

fn failure(status: StatusCode, why: impl std::fmt::Display) -> Response<Full<Bytes>> {
    response(status, error_body(why))
}

fn error_body(why: impl std::fmt::Display) -> String {
    format!("{}\n", json!({"error": why.to_string()}))
}

fn response(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

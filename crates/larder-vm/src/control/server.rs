//! The thread that serves the control socket.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::handlers::{ConnectionState, handle_request};
use super::subject::Subject;
use super::writers::Writers;
use crate::listen::{Access, ListenError, ListeningSocket};
use crate::read_group::read_group;

/// Maximum number of concurrent clients. A further client replaces the one that has been silent longest; if all have
/// sent a request, it waits until one is answered.
const CLIENTS_MAX: usize = 64;

/// Maximum number of event subscribers, in addition to those clients.
const SUBSCRIBERS_MAX: usize = 16;

/// Longest time for a client to send its request.
const REQUEST_HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time from a client's connection to the last byte of its answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum length of the request line and all headers, in bytes.
const REQUEST_HEAD_BYTES_MAX: usize = 16 << 10;

/// Longest wait for pending answers when the server ends after them.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause after accepting a client failed because the process or the host has no descriptors or memory left.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Reason why there is no control socket.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ControlError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot start the control socket's thread: {0}")]
    Start(#[from] io::Error),
}

/// The socket of a control server.
pub struct ControlSocket {
    listener: Listener,
    writers: Arc<Writers>,
}

enum Listener {
    /// The socket's file is removed when this is dropped.
    Bound(ListeningSocket),
    /// The socket's file remains.
    Inherited(OwnedFd),
}

impl ControlSocket {
    /// Listens on `path`. The users of `access` may change something, and members of the read group may read.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn bind(path: &Path, access: Access) -> Result<Self, ListenError> {
        let access = access.with_readers(read_group());
        Ok(Self {
            listener: Listener::Bound(ListeningSocket::bind(path, access)?),
            writers: Arc::new(Writers::for_bound(path, access)),
        })
    }

    /// Takes over a socket that another process created at `path`. In addition to the users of `access`, the owner
    /// and the group of the file may change something, as far as its mode permits writing.
    pub fn from_inherited(listener: OwnedFd, path: &Path, access: Access) -> Self {
        Self {
            listener: Listener::Inherited(listener),
            writers: Arc::new(Writers::for_inherited(path, access.with_readers(read_group()))),
        }
    }
}

/// A running control server. It ends when this is dropped, whatever its clients do.
pub struct ControlServer {
    /// Dropping this ends the thread at once; sending to it ends the thread after all pending requests are answered.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// Declared last, so that it is dropped last.
    _socket: ControlSocket,
}

impl ControlServer {
    /// Listens on `path`, and serves `subject` there. The user of this process and root may change something, and
    /// members of the read group may read.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing is left behind then.
    pub fn start(path: &Path, subject: Arc<Subject>) -> Result<Self, ControlError> {
        Self::start_with_socket(ControlSocket::bind(path, Access::OWNER)?, subject)
    }

    /// Serves `subject` on an existing socket.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing is left behind then.
    pub fn start_with_socket(socket: ControlSocket, subject: Arc<Subject>) -> Result<Self, ControlError> {
        let listener = match &socket.listener {
            Listener::Bound(socket) => socket.descriptor.try_clone()?,
            Listener::Inherited(listener) => listener.try_clone()?,
        };
        let writers = Arc::clone(&socket.writers);
        let listener = std::os::unix::net::UnixListener::from(listener);
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let listener = {
            let _inside = runtime.enter();
            UnixListener::from_std(listener)?
        };
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("larder-control".to_owned())
            .spawn(move || run(&runtime, listener, (subject, writers), stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread), _socket: socket })
    }

    /// Ends the server after all pending requests are answered.
    pub fn shut_down_gracefully(mut self) {
        if let Some(stop) = self.stop.take() {
            // If the thread has died, its panic has been reported.
            let _ = stop.send(());
        }
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported.
            let _ = thread.join();
        }
    }
}

fn run(
    runtime: &Runtime,
    listener: UnixListener,
    (subject, writers): (Arc<Subject>, Arc<Writers>),
    stopped: oneshot::Receiver<()>,
) {
    runtime.block_on(async {
        let (end, ended) = oneshot::channel();
        let mut accepting = std::pin::pin!(accept_clients(listener, subject, writers, ended));
        let is_graceful = tokio::select! {
            () = &mut accepting => return,
            stopped = stopped => stopped.is_ok(),
        };
        if is_graceful {
            drop(end);
            let _ = timeout(DRAIN_TIMEOUT, accepting).await;
        }
    });
}

/// A client that is being served.
struct Client {
    task: AbortHandle,
    connection: Arc<ConnectionState>,
}

/// Serves clients until `end`, and then completes the pending requests; dropping the future ends all.
async fn accept_clients(
    listener: UnixListener,
    subject: Arc<Subject>,
    writers: Arc<Writers>,
    mut end: oneshot::Receiver<()>,
) {
    let mut tasks = JoinSet::new();
    let subscriber_slots = Arc::new(Semaphore::new(SUBSCRIBERS_MAX));
    // In order of connection, without event subscribers.
    let mut clients: Vec<Client> = Vec::with_capacity(CLIENTS_MAX + 1);
    let mut is_reported = false;
    loop {
        clients.retain(|client| !client.task.is_finished() && !client.connection.is_subscriber());
        let can_accept =
            clients.len() < CLIENTS_MAX || clients.iter().any(|client| client.connection.is_awaiting_request());
        let accepted = tokio::select! {
            _ = &mut end => break,
            Some(_) = tasks.join_next() => continue,
            accepted = listener.accept(), if can_accept => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                if clients.len() >= CLIENTS_MAX
                    && let Some(oldest) = clients.iter().position(|client| client.connection.is_awaiting_request())
                {
                    clients.remove(oldest).task.abort();
                }
                let asked = Arc::new(ConnectionState::new(Arc::clone(&subscriber_slots), writers.permits(&stream)));
                let serving = serve_request(stream, Arc::clone(&subject), Arc::clone(&asked));
                let task = tasks.spawn(serve_with_deadline(serving, Arc::clone(&asked)));
                clients.push(Client { task, connection: asked });
                is_reported = false;
            }
            Err(error) => {
                if !std::mem::replace(&mut is_reported, true) {
                    tracing::warn!("the control socket cannot accept a client: {error}");
                }
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
    let is_pending = |client: &Client| {
        !client.task.is_finished() && !client.connection.is_subscriber() && !client.connection.is_awaiting_request()
    };
    while clients.iter().any(is_pending) && tasks.join_next().await.is_some() {}
}

/// Serves a client within its time limits.
async fn serve_with_deadline(serving: impl Future<Output = ()>, asked: Arc<ConnectionState>) {
    let deadline = async {
        sleep(CLIENT_TIMEOUT).await;
        if asked.is_subscriber() {
            asked.stalled().await;
        }
    };
    tokio::select! {
        () = serving => {}
        () = deadline => {}
    }
}

/// Serves one request with one answer.
async fn serve_request(client: UnixStream, subject: Arc<Subject>, asked: Arc<ConnectionState>) {
    let service = service_fn(|request| {
        let (subject, asked) = (Arc::clone(&subject), Arc::clone(&asked));
        async move { Ok::<_, Infallible>(handle_request(request, &subject, &asked).await) }
    });
    let served = http1::Builder::new()
        .keep_alive(false)
        // A client may close its sending side after the request, and still read the answer.
        .half_close(true)
        .max_buf_size(REQUEST_HEAD_BYTES_MAX)
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(client), service)
        .await;
    if let Err(error) = served {
        tracing::debug!("a client of the control socket: {error}");
    }
}

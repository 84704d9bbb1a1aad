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

use super::answers::{Asked, answer};
use super::subject::Subject;
use super::writers::Writers;
use crate::listen::{Access, ListenError, Listening};
use crate::read_group::read_group;

/// Maximum number of concurrent clients. A further client replaces the one that has been silent longest; if all have
/// sent a request, it waits until one is answered.
const CLIENTS_MAX: usize = 64;

/// Maximum number of event subscribers, in addition to those clients.
const LISTENERS_MAX: usize = 16;

/// Longest time for a client to send its request.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(5);

/// Longest time from a client's connection to the last byte of its answer.
const CLIENT_TIME_MAX: Duration = Duration::from_secs(10);

/// Maximum length of the request line and all headers, in bytes.
const REQUEST_HEAD_BYTES_MAX: usize = 16 << 10;

/// Longest wait for pending answers when the server ends after them.
const LAST_ANSWERS_TIME_MAX: Duration = Duration::from_secs(1);

/// Pause after accepting a client failed because the process or the host has no descriptors or memory left.
const PAUSE: Duration = Duration::from_millis(100);

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
    Own(Listening),
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
            listener: Listener::Own(Listening::on(path, access)?),
            writers: Arc::new(Writers::of_own(path, access)),
        })
    }

    /// Takes over a socket that another process created at `path`. In addition to the users of `access`, the owner
    /// and the group of the file may change something, as far as its mode permits writing.
    pub fn inherited(listener: OwnedFd, path: &Path, access: Access) -> Self {
        Self {
            listener: Listener::Inherited(listener),
            writers: Arc::new(Writers::of_inherited(path, access.with_readers(read_group()))),
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
        Self::start_on(ControlSocket::bind(path, Access::OWNER)?, subject)
    }

    /// Serves `subject` on an existing socket.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing is left behind then.
    pub fn start_on(socket: ControlSocket, subject: Arc<Subject>) -> Result<Self, ControlError> {
        let listener = match &socket.listener {
            Listener::Own(socket) => socket.descriptor.try_clone()?,
            Listener::Inherited(listener) => listener.try_clone()?,
        };
        let writers = Arc::clone(&socket.writers);
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
            .spawn(move || run(&runtime, listener, (subject, writers), stopped))?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
            _socket: socket,
        })
    }

    /// Ends the server after all pending requests are answered.
    pub fn end_after_answers(mut self) {
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
        let mut accepting = std::pin::pin!(accept(listener, subject, writers, ended));
        let is_patient = tokio::select! {
            () = &mut accepting => return,
            stopped = stopped => stopped.is_ok(),
        };
        if is_patient {
            drop(end);
            let _ = timeout(LAST_ANSWERS_TIME_MAX, accepting).await;
        }
    });
}

/// A client that is being served.
struct Client {
    task: AbortHandle,
    asked: Arc<Asked>,
}

/// Serves clients until `end`, and then completes the pending requests; dropping the future ends all.
async fn accept(listener: UnixListener, subject: Arc<Subject>, writers: Arc<Writers>, mut end: oneshot::Receiver<()>) {
    let mut tasks = JoinSet::new();
    let listeners = Arc::new(Semaphore::new(LISTENERS_MAX));
    // In order of connection, without event subscribers.
    let mut clients: Vec<Client> = Vec::with_capacity(CLIENTS_MAX + 1);
    let mut is_told = false;
    loop {
        clients.retain(|client| !client.task.is_finished() && !client.asked.listens());
        let may_come = clients.len() < CLIENTS_MAX || clients.iter().any(|client| client.asked.is_silent());
        let accepted = tokio::select! {
            _ = &mut end => break,
            Some(_) = tasks.join_next() => continue,
            accepted = listener.accept(), if may_come => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                if clients.len() >= CLIENTS_MAX
                    && let Some(oldest) = clients.iter().position(|client| client.asked.is_silent())
                {
                    clients.remove(oldest).task.abort();
                }
                let asked = Arc::new(Asked::new(Arc::clone(&listeners), writers.include(&stream)));
                let serving = serve(stream, Arc::clone(&subject), Arc::clone(&asked));
                let task = tasks.spawn(until_late(serving, Arc::clone(&asked)));
                clients.push(Client { task, asked });
                is_told = false;
            }
            Err(error) => {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!("the control socket cannot accept a client: {error}");
                }
                sleep(PAUSE).await;
            }
        }
    }
    let is_waited_for =
        |client: &Client| !client.task.is_finished() && !client.asked.listens() && !client.asked.is_silent();
    while clients.iter().any(is_waited_for) && tasks.join_next().await.is_some() {}
}

/// Serves a client within its time limits.
async fn until_late(serving: impl Future<Output = ()>, asked: Arc<Asked>) {
    let late = async {
        sleep(CLIENT_TIME_MAX).await;
        if asked.listens() {
            asked.is_stuck().await;
        }
    };
    tokio::select! {
        () = serving => {}
        () = late => {}
    }
}

/// Serves one request with one answer.
async fn serve(client: UnixStream, subject: Arc<Subject>, asked: Arc<Asked>) {
    let service = service_fn(|request| {
        let (subject, asked) = (Arc::clone(&subject), Arc::clone(&asked));
        async move { Ok::<_, Infallible>(answer(request, &subject, &asked).await) }
    });
    let served = http1::Builder::new()
        .keep_alive(false)
        // A client may close its sending side after the request, and still read the answer.
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

//! HTTP server: accepts connections and serves them.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use larder_vm::listen::SocketFile;
use larder_vm::vm::{config, find};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::balance_loop::{self, BalanceConfig, available};
use crate::discovery::Finder;
use crate::fleet::Fleet;
use crate::handlers::handle;
use crate::listen::{AccessControl, HostConfig, HostError, ListenAddress};

/// Largest number of connections. A further one replaces the connection that has been idle for the longest time.
const CLIENTS_MAX: usize = 128;

/// Largest number of clients that receive event streams; they count as connections, too.
const STREAMS_MAX: usize = 64;

/// Time within which a client must send a request head or finish its TLS handshake.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);

/// Time within which a client must receive its response.
const RESPONSE_TIME_MAX: Duration = Duration::from_secs(60);

/// Longest request line with all headers, in bytes.
const REQUEST_HEAD_BYTES_MAX: usize = 16 << 10;

/// Mode of a unix socket without `--socket-mode`.
const SOCKET_MODE_DEFAULT: u32 = 0o600;

/// Pause after a connection cannot be accepted because the process, or the host, is out of descriptors or memory.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Server of the metrics and the dashboard.
pub struct HostServer {
    runtime: Runtime,
    listener: Listener,
    site: Arc<ServerContext>,
    balance: Option<BalanceConfig>,
    stop: Arc<Notify>,
}

/// Listening socket.
enum Listener {
    Tcp(TcpListener),
    /// Unix socket, whose file is removed with the listener.
    Unix {
        listener: UnixListener,
        _file: SocketFile,
    },
}

/// Connection of a client.
enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listener {
    async fn accept(&self) -> io::Result<ClientStream> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, _)| ClientStream::Tcp(stream)),
            Self::Unix { listener, .. } => listener.accept().await.map(|(stream, _)| ClientStream::Unix(stream)),
        }
    }
}

/// Handle that ends [`HostServer::run`].
#[derive(Clone)]
pub struct StopHandle(Arc<Notify>);

impl StopHandle {
    /// Ends [`HostServer::run`] now, or as soon as it runs.
    pub fn stop(&self) {
        self.0.notify_one();
    }
}

/// State that all requests share.
pub(crate) struct ServerContext {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) access: AccessControl,
    pub(crate) listen: ListenAddress,
    pub(crate) streams: Arc<Semaphore>,
}

impl HostServer {
    /// Creates the server and listens.
    ///
    /// # Errors
    /// See [`HostError`].
    pub fn new(config: &HostConfig) -> Result<Self, HostError> {
        let access = config.access()?;
        if config.balance.is_some() {
            available().map_err(HostError::Memory)?;
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            // Blocking threads only scan directories, one of which may hang. The bound keeps hung threads from
            // accumulating.
            .max_blocking_threads(1)
            .build()
            .map_err(HostError::Start)?;
        let (listener, listen) = bind(&runtime, config)?;
        let mut finder = Finder::new(
            find::registry_runtime_directories(),
            find::memory_directories(),
            find::migration_directories(),
            config::vms_directory(),
        );
        if let ListenAddress::Unix(path) = &listen {
            finder.ignore_socket(path);
        }
        Ok(Self {
            runtime,
            listener,
            site: Arc::new(ServerContext {
                fleet: Arc::new(Fleet::new(finder)),
                access,
                listen,
                streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            }),
            balance: config.balance,
            stop: Arc::default(),
        })
    }

    /// Returns the address at which clients reach the server.
    pub fn address(&self) -> ServerAddress<'_> {
        let scheme = if self.site.access.tls.is_some() { "https" } else { "http" };
        match &self.site.listen {
            ListenAddress::Tcp(address) => ServerAddress::Url(format!("{scheme}://{address}/")),
            ListenAddress::Unix(path) => ServerAddress::Socket(path),
        }
    }

    /// Returns the file with the token that clients must present, if there is a token.
    pub fn token_file(&self) -> Option<&Path> {
        self.site.access.token_file.as_deref()
    }

    /// Returns a handle that ends [`HostServer::run`].
    pub fn stop(&self) -> StopHandle {
        StopHandle(Arc::clone(&self.stop))
    }

    /// Serves until it is stopped.
    pub fn run(self) {
        let Self { runtime, listener, site, balance, stop } = self;
        let fleet = Arc::clone(&site.fleet);
        let balancing = async {
            match balance {
                Some(balance) => balance_loop::run(fleet, balance).await,
                None => std::future::pending().await,
            }
        };
        runtime.block_on(async {
            tokio::select! {
                () = accept(listener, Arc::clone(&site)) => {}
                () = Arc::clone(&site.fleet).run() => {}
                () = balancing => {}
                () = stop.notified() => {}
            }
        });
        // Does not wait for a directory scan that is stuck.
        runtime.shutdown_background();
    }
}

/// Address of a [`HostServer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddress<'a> {
    /// URL of the dashboard.
    Url(String),
    /// Path of a unix socket.
    Socket(&'a Path),
}

fn bind(runtime: &Runtime, config: &HostConfig) -> Result<(Listener, ListenAddress), HostError> {
    match &config.listen {
        ListenAddress::Tcp(address) => {
            let failed = |source| HostError::Listen { listen: *address, source };
            let listener = runtime.block_on(TcpListener::bind(address)).map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            Ok((Listener::Tcp(listener), ListenAddress::Tcp(address)))
        }
        ListenAddress::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let mut access = config.socket;
            access.mode.get_or_insert(SOCKET_MODE_DEFAULT);
            let file = SocketFile::bind_with_access(&path, access)?;
            let listener = file.descriptor().map_err(HostError::Start)?;
            let listener = std::os::unix::net::UnixListener::from(listener);
            listener.set_nonblocking(true).map_err(HostError::Start)?;
            let _runtime_guard = runtime.enter();
            let listener = UnixListener::from_std(listener).map_err(HostError::Start)?;
            Ok((Listener::Unix { listener, _file: file }, ListenAddress::Unix(path)))
        }
    }
}

/// Activity of a client.
pub(crate) struct ClientActivity {
    /// Time of its connection, or of its latest request.
    last_request: std::sync::Mutex<Instant>,
    is_streaming: AtomicBool,
}

impl ClientActivity {
    fn new() -> Self {
        Self { last_request: std::sync::Mutex::new(Instant::now()), is_streaming: AtomicBool::new(false) }
    }

    fn record_request(&self) {
        *self.last_request.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Instant::now();
    }

    /// Marks the client as receiving an event stream.
    pub(crate) fn start_streaming(&self) {
        self.is_streaming.store(true, Ordering::Relaxed);
    }

    fn is_streaming(&self) -> bool {
        self.is_streaming.load(Ordering::Relaxed)
    }

    fn idle_time(&self) -> Duration {
        let last_request = self.last_request.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        last_request.elapsed()
    }

    /// Completes when the client's response, or its next request, takes too long.
    async fn timed_out(&self) {
        loop {
            sleep(REQUEST_TIME_MAX).await;
            if !self.is_streaming() && self.idle_time() > RESPONSE_TIME_MAX {
                return;
            }
        }
    }
}

async fn accept(listener: Listener, site: Arc<ServerContext>) {
    let tls = site.access.tls.as_ref().map(|tls| TlsAcceptor::from(tls.config()));
    let mut tasks = JoinSet::new();
    let mut clients: Vec<(AbortHandle, Arc<ClientActivity>)> = Vec::with_capacity(CLIENTS_MAX);
    let mut warned = false;
    loop {
        clients.retain(|(task, _)| !task.is_finished());
        let accepted = tokio::select! {
            Some(_) = tasks.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!("cannot accept a connection: {error}");
                }
                sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        warned = false;
        if clients.len() >= CLIENTS_MAX {
            let idle_clients = clients.iter().enumerate().filter(|(_, (_, client))| !client.is_streaming());
            let idlest = idle_clients.max_by_key(|(_, (_, client))| client.idle_time()).map(|(index, _)| index);
            if let Some(idlest) = idlest {
                clients.remove(idlest).0.abort();
            }
        }
        let client = Arc::new(ClientActivity::new());
        let (tls, site) = (tls.clone(), Arc::clone(&site));
        let task = match stream {
            ClientStream::Tcp(stream) => {
                // Responses are written at once, so Nagle's algorithm would only delay them.
                let _ = stream.set_nodelay(true);
                tasks.spawn(serve_client(stream, tls, site, Arc::clone(&client)))
            }
            ClientStream::Unix(stream) => tasks.spawn(serve_client(stream, tls, site, Arc::clone(&client))),
        };
        clients.push((task, client));
    }
}

async fn serve_client(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    tls: Option<TlsAcceptor>,
    site: Arc<ServerContext>,
    client: Arc<ClientActivity>,
) {
    let serving = async {
        match tls {
            None => serve(stream, &site, &client).await,
            Some(tls) => match timeout(REQUEST_TIME_MAX, tls.accept(stream)).await {
                Ok(Ok(stream)) => serve(stream, &site, &client).await,
                Ok(Err(error)) => tracing::debug!("a client: {error}"),
                Err(_) => {}
            },
        }
    };
    tokio::select! {
        () = serving => {}
        () = client.timed_out() => {}
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, site: &Arc<ServerContext>, client: &Arc<ClientActivity>) {
    let service = service_fn(|request| {
        client.record_request();
        let (site, client) = (Arc::clone(site), Arc::clone(client));
        async move { Ok::<_, Infallible>(handle(request, &site, &client).await) }
    });
    let served = http1::Builder::new()
        .half_close(true)
        .max_buf_size(REQUEST_HEAD_BYTES_MAX)
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIME_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!("a client: {error}");
    }
}

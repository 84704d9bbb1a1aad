//! Listens, and serves whoever comes.

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

use crate::answers::answer;
use crate::balancing::{self, BalanceConfig, available};
use crate::find::Finder;
use crate::fleet::Fleet;
use crate::listen::{Access, HostConfig, HostError, ListenAddress};

/// Connections at a time. A further one takes the place of the one that has asked nothing for the longest time.
const CLIENTS_MAX: usize = 128;

/// Clients that follow what happens, at a time; they are among those.
const STREAMS_MAX: usize = 64;

/// How long a client may take for a request, and for saying who it is.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);

/// How long a client may take for its answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// The longest request line with all headers, in bytes.
const REQUEST_HEAD_BYTES_MAX: usize = 16 << 10;

/// The mode of a unix socket without `--socket-mode`.
const SOCKET_MODE_DEFAULT: u32 = 0o600;

/// The pause after a client that cannot be taken because the process, or the host, is out of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves metrics and the dashboard.
pub struct Host {
    runtime: Runtime,
    listener: Listener,
    site: Arc<Site>,
    balance: Option<BalanceConfig>,
    stop: Arc<Notify>,
}

/// A listening socket.
enum Listener {
    Tcp(TcpListener),
    /// The file is removed with the listener.
    Unix {
        listener: UnixListener,
        _file: SocketFile,
    },
}

/// A client's connection.
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listener {
    async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, _)| Stream::Tcp(stream)),
            Self::Unix { listener, .. } => listener.accept().await.map(|(stream, _)| Stream::Unix(stream)),
        }
    }
}

/// Ends [`Host::run`].
#[derive(Clone)]
pub struct Stop(Arc<Notify>);

impl Stop {
    /// Ends it now, or as soon as it runs.
    pub fn stop(&self) {
        self.0.notify_one();
    }
}

/// What is served.
pub(crate) struct Site {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) access: Access,
    pub(crate) listen: ListenAddress,
    pub(crate) streams: Arc<Semaphore>,
}

impl Host {
    /// Listens.
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
            // They look through folders, of which one may be stuck.
            .max_blocking_threads(1)
            .build()
            .map_err(HostError::Start)?;
        let (listener, listen) = bind(&runtime, config)?;
        let mut finder = Finder::new(
            find::folders(),
            find::memory_folders(),
            find::moves_folders(),
            config::folder(),
        );
        if let ListenAddress::Unix(path) = &listen {
            finder.leave_out(path);
        }
        Ok(Self {
            runtime,
            listener,
            site: Arc::new(Site {
                fleet: Arc::new(Fleet::new(finder)),
                access,
                listen,
                streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            }),
            balance: config.balance,
            stop: Arc::default(),
        })
    }

    /// Returns the address at which clients reach it.
    pub fn address(&self) -> Address<'_> {
        let scheme = if self.site.access.tls.is_some() {
            "https"
        } else {
            "http"
        };
        match &self.site.listen {
            ListenAddress::Tcp(address) => Address::Url(format!("{scheme}://{address}/")),
            ListenAddress::Unix(path) => Address::Socket(path),
        }
    }

    /// Returns the file with the token that clients must present, if there is a token.
    pub fn token_file(&self) -> Option<&Path> {
        self.site.access.token_file.as_deref()
    }

    /// What ends it.
    pub fn stop(&self) -> Stop {
        Stop(Arc::clone(&self.stop))
    }

    /// Serves until it is stopped.
    pub fn run(self) {
        let Self {
            runtime,
            listener,
            site,
            balance,
            stop,
        } = self;
        let fleet = Arc::clone(&site.fleet);
        let balancing = async {
            match balance {
                Some(balance) => balancing::run(fleet, balance).await,
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
        // A folder that is stuck is not waited for.
        runtime.shutdown_background();
    }
}

/// The address of a [`Host`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address<'a> {
    /// The URL of the dashboard.
    Url(String),
    /// The path of a unix socket.
    Socket(&'a Path),
}

fn bind(runtime: &Runtime, config: &HostConfig) -> Result<(Listener, ListenAddress), HostError> {
    match &config.listen {
        ListenAddress::Tcp(address) => {
            let failed = |source| HostError::Listen {
                listen: *address,
                source,
            };
            let listener = runtime.block_on(TcpListener::bind(address)).map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            Ok((Listener::Tcp(listener), ListenAddress::Tcp(address)))
        }
        ListenAddress::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let mut access = config.socket;
            access.mode.get_or_insert(SOCKET_MODE_DEFAULT);
            let file = SocketFile::bind_for(&path, access)?;
            let listener = file.descriptor().map_err(HostError::Start)?;
            let listener = std::os::unix::net::UnixListener::from(listener);
            listener.set_nonblocking(true).map_err(HostError::Start)?;
            let _inside = runtime.enter();
            let listener = UnixListener::from_std(listener).map_err(HostError::Start)?;
            Ok((Listener::Unix { listener, _file: file }, ListenAddress::Unix(path)))
        }
    }
}

/// What a client is doing.
pub(crate) struct Client {
    /// When it came, or last asked.
    asked: std::sync::Mutex<Instant>,
    streams: AtomicBool,
}

impl Client {
    fn new() -> Self {
        Self {
            asked: std::sync::Mutex::new(Instant::now()),
            streams: AtomicBool::new(false),
        }
    }

    fn asks(&self) {
        *self.asked.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Instant::now();
    }

    /// It follows what happens from now on.
    pub(crate) fn follows(&self) {
        self.streams.store(true, Ordering::Relaxed);
    }

    fn is_following(&self) -> bool {
        self.streams.load(Ordering::Relaxed)
    }

    fn quiet_for(&self) -> Duration {
        let asked = self.asked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        asked.elapsed()
    }

    /// Completes when its answer, or its next question, takes too long.
    async fn is_late(&self) {
        loop {
            sleep(REQUEST_TIME_MAX).await;
            if !self.is_following() && self.quiet_for() > ANSWER_TIME_MAX {
                return;
            }
        }
    }
}

async fn accept(listener: Listener, site: Arc<Site>) {
    let tls = site.access.tls.as_ref().map(|tls| TlsAcceptor::from(tls.config()));
    let mut tasks = JoinSet::new();
    let mut clients: Vec<(AbortHandle, Arc<Client>)> = Vec::with_capacity(CLIENTS_MAX);
    let mut is_told = false;
    loop {
        clients.retain(|(task, _)| !task.is_finished());
        let accepted = tokio::select! {
            Some(_) = tasks.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!("cannot take a client: {error}");
                }
                sleep(PAUSE).await;
                continue;
            }
        };
        is_told = false;
        if clients.len() >= CLIENTS_MAX {
            let quiet = clients
                .iter()
                .enumerate()
                .filter(|(_, (_, client))| !client.is_following());
            let quietest = quiet
                .max_by_key(|(_, (_, client))| client.quiet_for())
                .map(|(place, _)| place);
            if let Some(quietest) = quietest {
                clients.remove(quietest).0.abort();
            }
        }
        let client = Arc::new(Client::new());
        let (tls, site) = (tls.clone(), Arc::clone(&site));
        let task = match stream {
            Stream::Tcp(stream) => {
                // Answers are written at once.
                let _ = stream.set_nodelay(true);
                tasks.spawn(meet(stream, tls, site, Arc::clone(&client)))
            }
            Stream::Unix(stream) => tasks.spawn(meet(stream, tls, site, Arc::clone(&client))),
        };
        clients.push((task, client));
    }
}

async fn meet(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    tls: Option<TlsAcceptor>,
    site: Arc<Site>,
    client: Arc<Client>,
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
        () = client.is_late() => {}
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, site: &Arc<Site>, client: &Arc<Client>) {
    let service = service_fn(|request| {
        client.asks();
        let (site, client) = (Arc::clone(site), Arc::clone(client));
        async move { Ok::<_, Infallible>(answer(request, &site, &client).await) }
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

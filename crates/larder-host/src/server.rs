//! Listens, and serves whoever comes.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use larder_vm::vm::{config, find};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::answers::answer;
use crate::balancing::{self, BalanceConfig, available};
use crate::find::Finder;
use crate::fleet::Fleet;
use crate::listen::{Access, HostConfig, HostError};

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

/// The pause after a client that cannot be taken because the process, or the host, is out of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves metrics and the dashboard.
pub struct Host {
    runtime: Runtime,
    listener: TcpListener,
    site: Arc<Site>,
    balance: Option<BalanceConfig>,
    stop: Arc<Notify>,
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
    pub(crate) listen: SocketAddr,
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
        let failed = |source| HostError::Listen {
            listen: config.listen,
            source,
        };
        let listener = runtime.block_on(TcpListener::bind(config.listen)).map_err(failed)?;
        let listen = listener.local_addr().map_err(failed)?;
        Ok(Self {
            runtime,
            listener,
            site: Arc::new(Site {
                fleet: Arc::new(Fleet::new(Finder::new(
                    find::folders(),
                    find::memory_folders(),
                    find::moves_folders(),
                    config::folder(),
                ))),
                access,
                listen,
                streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            }),
            balance: config.balance,
            stop: Arc::default(),
        })
    }

    /// Where it is reached.
    pub fn url(&self) -> String {
        let scheme = if self.site.access.tls.is_some() {
            "https"
        } else {
            "http"
        };
        format!("{scheme}://{}/", self.site.listen)
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

async fn accept(listener: TcpListener, site: Arc<Site>) {
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
            Ok((stream, _)) => stream,
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
        let task = tasks.spawn(meet(stream, tls.clone(), Arc::clone(&site), Arc::clone(&client)));
        clients.push((task, client));
    }
}

async fn meet(stream: TcpStream, tls: Option<TlsAcceptor>, site: Arc<Site>, client: Arc<Client>) {
    // Answers are written at once.
    let _ = stream.set_nodelay(true);
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

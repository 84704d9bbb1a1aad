//! The exports of a disk: started and stopped together on the disk's loop.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use larder_block::event_loop::{JoinHandle, Listener, Socket, SocketAddress};
use larder_block::nbd::{ExportDescription, NbdUri};
use larder_block::opener;
use larder_block::tls::{ServerTls, TlsError};
use larder_block::{BlockDevice, Loop};
use larder_export::activity::Activity;
use larder_export::clients::Clients;
use larder_export::nbd::{NbdServer, NbdServerOptions};
use larder_export::vhost_user::{OptionsError, StopMode, VhostUserOptions, VhostUserServer};

use crate::control::state::{ExportsState, NbdState, VhostUserState};
use crate::image::ImageAddress;
use crate::inherited::Inherited;
use crate::latch::Latch;
use crate::listen::{Access, ListenError, ListeningSocket, ListeningSocketFile};
use crate::run::shell::command_line;
use crate::runtime_directory;
use crate::vm::peer_domain;

/// Source of a vhost-user-blk server's front-ends.
#[derive(Clone, Debug)]
pub enum VhostUserSource {
    /// Listen on this path.
    Path(PathBuf),
    /// Use this inherited descriptor: a listening unix socket, or one connected to a front-end.
    Descriptor(Arc<OwnedFd>),
}

/// Address of an NBD server.
#[derive(Clone, Debug, PartialEq)]
pub struct NbdExportConfig {
    /// Address, export name and TLS, in the form that a client uses. `tls-certificates` is the directory of the
    /// server's `server-cert.pem` and `server-key.pem`; if it also has `ca-cert.pem`, clients must present a
    /// certificate of that CA.
    pub uri: NbdUri,
    /// Serve other hosts even without TLS.
    pub insecure: bool,
    /// Human-readable description of the export; may be empty.
    pub description: ExportDescription,
}

/// Exports of a disk.
#[derive(Clone, Debug, Default)]
pub struct ExportsConfig {
    /// vhost-user-blk export.
    pub vhost_user_source: Option<VhostUserSource>,
    /// Options of the vhost-user-blk export.
    pub vhost_user: VhostUserOptions,
    /// NBD export.
    pub nbd: Option<NbdExportConfig>,
    /// Permissions of the exports' unix sockets.
    pub access: Access,
    /// Sockets inherited from the previous process or systemd.
    pub inherited: Inherited,
    /// Disk name and image under which a front-end's connection is stored for the next process, if a supervisor
    /// stores connections.
    pub stored_connection: Option<(String, ImageAddress)>,
    /// File of this disk in which the next process finds the queues that their front-end has not taken back. It is
    /// created if missing.
    pub active_queues_file: Option<PathBuf>,
    /// UUID of the disk's libvirt domain: QEMUs of other domains may not connect.
    pub domain: Option<String>,
    /// Latch that opens the exports: no client is served before it is set.
    pub gate: Option<Latch<()>>,
}

impl ExportsConfig {
    /// Returns whether the disk has no export.
    pub fn is_empty(&self) -> bool {
        self.vhost_user_source.is_none() && self.nbd.is_none()
    }
}

/// Reason why a disk cannot be exported.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExportError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Options(#[from] OptionsError),
    #[error("cannot serve NBD on {address}: {source}")]
    Tcp { address: String, source: io::Error },
    #[error(
        "{address} is open to other hosts and has no TLS: anyone who reaches it could read and write the disk; use \
         nbds:// with ?tls-certificates=DIR, or a loopback address"
    )]
    Insecure { address: SocketAddr },
    #[error("{uri}: a TLS server needs ?tls-certificates=DIR, the directory with server-cert.pem and server-key.pem")]
    NoCertificates { uri: String },
    #[error("{uri}: tls-hostname is an option of clients; a server presents its own certificate")]
    ServerHostname { uri: String },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("the socket is broken: {0}")]
    Socket(#[from] io::Error),
}

/// The running exports of a disk.
#[derive(Default)]
pub struct Exports {
    vhost_user: Option<Rc<VhostUserServer>>,
    accept_task: RefCell<Option<JoinHandle<io::Result<()>>>>,
    /// Path of the file that records the queues that were not taken back.
    active_queues_file: Option<PathBuf>,
    nbd: Option<Rc<NbdServer>>,
    /// Addresses of the exports in machine-readable form.
    socket: Option<String>,
    uri: Option<String>,
    /// Removed after the last client has disconnected.
    files: RefCell<Vec<ListeningSocketFile>>,
    addresses: ExportAddresses,
}

/// Addresses of the exports, for pasting into a command line.
#[derive(Clone, Debug, Default)]
pub struct ExportAddresses {
    /// Socket of vhost-user-blk, or `fd 5`, quoted for a shell.
    pub vhost_user: Option<String>,
    /// URI for NBD clients, quoted for a shell.
    pub nbd: Option<String>,
}

/// The sockets of a disk's exports, before any client is served.
#[derive(Default)]
pub struct ExportSockets {
    vhost_user: Option<OwnedFd>,
    nbd: Vec<OwnedFd>,
    tls: Option<ServerTls>,
    files: Vec<ListeningSocketFile>,
}

impl ExportSockets {
    /// Listens on all sockets. Clients can connect, and wait.
    ///
    /// # Errors
    /// A socket cannot be listened on, or the exports' options are invalid; nothing is left behind then.
    pub fn bind(config: &ExportsConfig) -> Result<Self, ExportError> {
        // Invalid options are refused even without a vhost-user export.
        config.vhost_user.check()?;
        let mut sockets = Self::default();
        if let Some(at) = &config.nbd {
            sockets.tls = server_tls(&at.uri)?;
            sockets.nbd = match &at.uri.address {
                SocketAddress::Unix(path) => vec![sockets.listen_on(path, config)?],
                SocketAddress::Tcp { host, port } => bind_tcp(host, *port, sockets.tls.is_some() || at.insecure)?,
            };
        }
        sockets.vhost_user = match &config.vhost_user_source {
            None => None,
            Some(VhostUserSource::Path(path)) => Some(sockets.listen_on(path, config)?),
            Some(VhostUserSource::Descriptor(descriptor)) => Some(descriptor.try_clone()?),
        };
        Ok(sockets)
    }

    fn listen_on(&mut self, path: &Path, config: &ExportsConfig) -> Result<OwnedFd, ExportError> {
        if let Some(inherited) = config.inherited.socket_on(path)? {
            return Ok(inherited);
        }
        let listening = ListeningSocket::bind(path, config.access)?;
        self.files.push(listening.file);
        Ok(listening.descriptor)
    }
}

impl Exports {
    /// Starts all exports on `sockets`; their clients are counted in `clients`, and their requests in `activity`.
    ///
    /// # Errors
    /// A socket is broken, or the options are invalid; nothing is left behind then.
    pub fn start(
        on: &Loop,
        device: &Rc<dyn BlockDevice>,
        config: &ExportsConfig,
        sockets: ExportSockets,
        clients: &Rc<Clients>,
        activity: &Rc<Activity>,
    ) -> Result<Self, ExportError> {
        let mut exports = Self { files: RefCell::new(sockets.files), ..Self::default() };
        if let Some(at) = &config.nbd {
            let options = NbdServerOptions {
                export: at.uri.export.clone(),
                description: at.description.to_string(),
                clients: Some(Rc::clone(clients)),
                activity: Some(Rc::clone(activity)),
                tls: sockets.tls,
                ..NbdServerOptions::default()
            };
            exports.start_nbd(on, device, at, options, sockets.nbd, config)?;
        }
        if let (Some(at), Some(socket)) = (&config.vhost_user_source, sockets.vhost_user) {
            exports.start_vhost_user(on, device, (at, socket), config, (clients, activity))?;
        }
        Ok(exports)
    }

    /// Returns the addresses of the exports.
    pub fn addresses(&self) -> &ExportAddresses {
        &self.addresses
    }

    fn start_vhost_user(
        &mut self,
        on: &Loop,
        device: &Rc<dyn BlockDevice>,
        (at, descriptor): (&VhostUserSource, OwnedFd),
        config: &ExportsConfig,
        (clients, activity): (&Rc<Clients>, &Rc<Activity>),
    ) -> Result<(), ExportError> {
        let server = VhostUserServer::new(on, Rc::clone(device), &config.vhost_user, activity)?;
        server.set_clients(clients);
        // The image's path is looked up here, on the disk's thread, because its file server may not answer.
        let stored = config.stored_connection.as_ref();
        if let Some(stored) = stored.and_then(|(disk, image)| config.inherited.stored_connection(disk, image)) {
            server.enable_handover(&stored);
        }
        if let Some(uuid) = config.domain.clone() {
            server.set_admission_check(Box::new(move |connection| peer_domain::check_peer(connection, &uuid)));
        }
        if let Some(path) = &config.active_queues_file {
            let recorded = open_active_queues_file(path).and_then(|file| server.persist_active_queues(file));
            self.active_queues_file = recorded.is_ok().then(|| path.clone());
            if let Err(error) = recorded {
                tracing::warn!(
                    "{}: {error}: the next server will not know which queues of the disk were running, and could allow a migration that it \
                     must refuse",
                    path.display()
                );
            }
        }
        self.addresses.vhost_user = Some(match at {
            VhostUserSource::Path(path) => command_line(&[path.into()]),
            VhostUserSource::Descriptor(descriptor) => format!("fd {}", descriptor.as_raw_fd()),
        });
        let task_server = Rc::clone(&server);
        self.socket = Some(match at {
            VhostUserSource::Path(path) => path.display().to_string(),
            VhostUserSource::Descriptor(descriptor) => format!("fd {}", descriptor.as_raw_fd()),
        });
        let listening = rustix::net::sockopt::socket_acceptconn(&descriptor).map_err(io::Error::from)?;
        let gate = config.gate.clone();
        let accepting = if listening {
            let listener = Listener::from_descriptor(on, descriptor)?;
            on.spawn_with_result(async move {
                gate_opened(gate).await;
                task_server.run(&listener).await
            })
        } else {
            let socket = Socket::from_descriptor(on, descriptor)?;
            on.spawn_with_result(async move {
                gate_opened(gate).await;
                task_server.serve(socket).await;
                Ok(())
            })
        };
        self.accept_task.replace(Some(accepting));
        self.vhost_user = Some(server);
        Ok(())
    }

    fn start_nbd(
        &mut self,
        on: &Loop,
        device: &Rc<dyn BlockDevice>,
        at: &NbdExportConfig,
        options: NbdServerOptions,
        listeners: Vec<OwnedFd>,
        config: &ExportsConfig,
    ) -> Result<(), ExportError> {
        let uri = uri_for_clients(&at.uri).to_string();
        self.addresses.nbd = Some(command_line(&[(&uri).into()]));
        self.uri = Some(uri);
        let server = Rc::new(NbdServer::new(on, Rc::clone(device), options));
        for descriptor in listeners {
            let listener = Listener::from_descriptor(on, descriptor)?;
            let (task_server, gate) = (Rc::clone(&server), config.gate.clone());
            on.spawn(async move {
                gate_opened(gate).await;
                task_server.listen(listener);
            });
        }
        self.nbd = Some(server);
        Ok(())
    }

    /// Pauses or resumes all guest queues.
    pub fn set_paused(&self, paused: bool) {
        if let Some(server) = &self.vhost_user {
            server.set_paused(paused);
        }
    }

    /// Returns whether a guest has started its queues.
    pub fn has_running_queues(&self) -> bool {
        self.vhost_user.as_ref().is_some_and(|server| server.has_running_queue())
    }

    /// Returns a queue that its front-end has not taken back, and whose true position differs from the one that the
    /// front-end assumes.
    pub fn diverged_queue(&self) -> Option<u16> {
        self.vhost_user.as_ref().and_then(|server| server.queue_with_stale_base())
    }

    /// Returns the state of the exports.
    pub fn state(&self) -> ExportsState {
        let vhost_user = self.socket.clone().zip(self.vhost_user.as_ref());
        let nbd = self.uri.clone().zip(self.nbd.as_ref());
        ExportsState {
            vhost_user: vhost_user.map(|(socket, server)| VhostUserState { socket, connected: server.is_connected() }),
            nbd: nbd.map(|(uri, server)| NbdState { uri, clients: server.statistics().connections as u64 }),
        }
    }

    /// Completes when an export has ended by itself: its socket broke, or its only front-end disconnected. Never
    /// completes if no export can end like that.
    ///
    /// # Errors
    /// The socket broke.
    pub async fn ended(&self) -> io::Result<()> {
        let accepting = self.accept_task.borrow_mut().take();
        match accepting {
            Some(accepting) => accepting.await,
            None => std::future::pending().await,
        }
    }

    /// Stops taking requests, completes those in flight, and closes the exports; `stop_mode` decides about a
    /// front-end's connection.
    pub async fn stop(&self, on: &Loop, stop_mode: StopMode) {
        if let Some(server) = &self.vhost_user {
            server.stop(stop_mode);
            while server.is_connected() {
                on.sleep(Duration::from_millis(1)).await;
            }
            if let Some(path) = self.active_queues_file.as_ref().filter(|_| server.all_bases_fetched()) {
                // With all queues taken back, the file has no information.
                let _ = std::fs::remove_file(path);
            }
        }
        if let Some(server) = &self.nbd {
            server.stop().await;
        }
        self.files.take();
    }
}

/// Opens the file that records queues; the parent of its directory must exist.
fn open_active_queues_file(path: &Path) -> io::Result<File> {
    if let Some(directory) = path.parent() {
        runtime_directory::create(directory, 0o700)?;
    }
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.open(path)
}

/// Returns the URI that clients of an export at `uri` use: without the server's certificates.
fn uri_for_clients(uri: &NbdUri) -> NbdUri {
    let mut client_uri = uri.clone();
    if let Some(tls) = &mut client_uri.tls {
        tls.certificates = None;
    }
    client_uri
}

fn server_tls(uri: &NbdUri) -> Result<Option<ServerTls>, ExportError> {
    let Some(tls) = &uri.tls else {
        return Ok(None);
    };
    if tls.hostname.is_some() {
        return Err(ExportError::ServerHostname { uri: uri.to_string() });
    }
    let directory = tls.certificates.as_ref().ok_or_else(|| ExportError::NoCertificates { uri: uri.to_string() })?;
    let require_clients = opener::metadata(&directory.join("ca-cert.pem")).is_ok();
    Ok(Some(ServerTls::load_directory(directory, require_clients)?))
}

/// Listens on every address that the host name resolves to.
fn bind_tcp(host: &str, port: u16, open_to_others: bool) -> Result<Vec<OwnedFd>, ExportError> {
    let failed = |source| ExportError::Tcp { address: format!("{host}:{port}"), source };
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(failed)?.collect();
    if let Some(address) = addresses.iter().find(|address| !is_loopback(address.ip()) && !open_to_others) {
        return Err(ExportError::Insecure { address: *address });
    }
    let mut listeners = Vec::new();
    for address in addresses {
        listeners.push(TcpListener::bind(address).map_err(failed)?.into());
    }
    Ok(listeners)
}

fn is_loopback(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback(),
        IpAddr::V6(address) => {
            address.is_loopback() || address.to_ipv4_mapped().is_some_and(|address| address.is_loopback())
        }
    }
}

async fn gate_opened(gate: Option<Latch<()>>) {
    if let Some(gate) = gate {
        gate.wait_until_set().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_port_without_tls_is_refused() {
        assert!(matches!(bind_tcp("0.0.0.0", 0, false), Err(ExportError::Insecure { .. })));
        assert!(matches!(bind_tcp("::", 0, false), Err(ExportError::Insecure { .. })));
        assert_eq!(bind_tcp("127.0.0.1", 0, false).expect("loopback is fine").len(), 1);
        assert_eq!(bind_tcp("0.0.0.0", 0, true).expect("the user said so").len(), 1);
    }
}

//! The exports of a disk: started together on the disk's loop, stopped together.

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
use larder_export::vhost_user::{OptionsError, Stop, VhostUserOptions, VhostUserServer};

use crate::control::state::{ExportsState, NbdState, VhostUserState};
use crate::image::ImageAddress;
use crate::inherited::Inherited;
use crate::latch::Latch;
use crate::listen::{Access, ListenError, Listening, ListeningFile};
use crate::run::shell::command_line;
use crate::runtime_folder;
use crate::vm::front_end;

/// Where a vhost-user-blk server gets its front-ends from.
#[derive(Clone, Debug)]
pub enum VhostUserAt {
    /// It listens on this path.
    Path(PathBuf),
    /// It inherited this descriptor: a listening unix socket, or one that a front-end is connected to.
    Descriptor(Arc<OwnedFd>),
}

/// Where an NBD server listens.
#[derive(Clone, Debug, PartialEq)]
pub struct NbdAt {
    /// Address, export name and TLS, as a client would write them. `tls-certificates` is the folder of the server's
    /// `server-cert.pem` and `server-key.pem`; if `ca-cert.pem` is there too, clients must show a certificate of its.
    pub uri: NbdUri,
    /// Serve other hosts without TLS all the same.
    pub insecure: bool,
    /// The export's description, for people; may be empty.
    pub description: ExportDescription,
}

/// What a disk is served as.
#[derive(Clone, Debug, Default)]
pub struct ExportsConfig {
    /// vhost-user-blk.
    pub vhost_user_at: Option<VhostUserAt>,
    /// How it presents itself there.
    pub vhost_user: VhostUserOptions,
    /// NBD.
    pub nbd: Option<NbdAt>,
    /// Who may connect to their unix sockets.
    pub access: Access,
    /// Those of them that there are already.
    pub inherited: Inherited,
    /// As which disk, of which image, a front-end's connection is kept for the next process, if somebody keeps it.
    pub kept: Option<(String, ImageAddress)>,
    /// The file, this disk's alone, where the next process finds which queues were not taken back by their front-end. It is
    /// made if it is not there.
    pub lent: Option<PathBuf>,
    /// The UUID of the libvirt domain that the disk is of: the QEMUs of other domains may not connect.
    pub domain: Option<String>,
    /// Nobody is served before it is set.
    pub gate: Option<Latch<()>>,
}

impl ExportsConfig {
    /// Whether the disk is served at all.
    pub fn is_empty(&self) -> bool {
        self.vhost_user_at.is_none() && self.nbd.is_none()
    }
}

/// Why a disk cannot be served.
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
    #[error("{uri}: a TLS server needs ?tls-certificates=DIR, the folder of server-cert.pem and server-key.pem")]
    NoCertificates { uri: String },
    #[error("{uri}: tls-hostname is for clients; a server shows the certificate that it has")]
    ServerHostname { uri: String },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("the socket is broken: {0}")]
    Socket(#[from] io::Error),
}

/// The exports of a disk at work.
#[derive(Default)]
pub struct Exports {
    vhost_user: Option<Rc<VhostUserServer>>,
    accepting: RefCell<Option<JoinHandle<io::Result<()>>>>,
    /// Where it is noted which queues were not taken back.
    lent: Option<PathBuf>,
    nbd: Option<Rc<NbdServer>>,
    /// Where they are, as it is told to programs.
    socket: Option<String>,
    uri: Option<String>,
    /// Removed when the last client is gone.
    files: RefCell<Vec<ListeningFile>>,
    places: Places,
}

/// Where a disk is served, for people to paste.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The socket of vhost-user-blk, or `fd 5`, quoted for a shell.
    pub vhost_user: Option<String>,
    /// The URI for clients of NBD, quoted for a shell.
    pub nbd: Option<String>,
}

/// The sockets of a disk's exports, before anybody is served.
#[derive(Default)]
pub struct Sockets {
    vhost_user: Option<OwnedFd>,
    nbd: Vec<OwnedFd>,
    tls: Option<ServerTls>,
    files: Vec<ListeningFile>,
}

impl Sockets {
    /// Listens on all of them. Clients can connect, and wait.
    ///
    /// # Errors
    /// One cannot be listened on, or the exports' options are wrong; nothing is left behind then.
    pub fn bind(config: &ExportsConfig) -> Result<Self, ExportError> {
        // Also where there is no vhost-user: what makes no sense is not passed over.
        config.vhost_user.check()?;
        let mut sockets = Self::default();
        if let Some(at) = &config.nbd {
            sockets.tls = server_tls(&at.uri)?;
            sockets.nbd = match &at.uri.address {
                SocketAddress::Unix(path) => vec![sockets.listen_on(path, config)?],
                SocketAddress::Tcp { host, port } => bind_tcp(host, *port, sockets.tls.is_some() || at.insecure)?,
            };
        }
        sockets.vhost_user = match &config.vhost_user_at {
            None => None,
            Some(VhostUserAt::Path(path)) => Some(sockets.listen_on(path, config)?),
            Some(VhostUserAt::Descriptor(descriptor)) => Some(descriptor.try_clone()?),
        };
        Ok(sockets)
    }

    fn listen_on(&mut self, path: &Path, config: &ExportsConfig) -> Result<OwnedFd, ExportError> {
        if let Some(inherited) = config.inherited.at(path)? {
            return Ok(inherited);
        }
        let listening = Listening::on(path, config.access)?;
        self.files.push(listening.file);
        Ok(listening.descriptor)
    }
}

impl Exports {
    /// Starts all of them on `sockets`; who uses them is counted among `clients`, and what they ask for in `activity`.
    ///
    /// # Errors
    /// A socket is broken, or the options are wrong; nothing is left behind then.
    pub fn start(
        on: &Loop,
        device: &Rc<dyn BlockDevice>,
        config: &ExportsConfig,
        sockets: Sockets,
        clients: &Rc<Clients>,
        activity: &Rc<Activity>,
    ) -> Result<Self, ExportError> {
        let mut exports = Self {
            files: RefCell::new(sockets.files),
            ..Self::default()
        };
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
        if let (Some(at), Some(socket)) = (&config.vhost_user_at, sockets.vhost_user) {
            exports.start_vhost_user(on, device, (at, socket), config, (clients, activity))?;
        }
        Ok(exports)
    }

    /// Where they are.
    pub fn places(&self) -> &Places {
        &self.places
    }

    fn start_vhost_user(
        &mut self,
        on: &Loop,
        device: &Rc<dyn BlockDevice>,
        (at, descriptor): (&VhostUserAt, OwnedFd),
        config: &ExportsConfig,
        (clients, activity): (&Rc<Clients>, &Rc<Activity>),
    ) -> Result<(), ExportError> {
        let server = VhostUserServer::new(on, Rc::clone(device), &config.vhost_user, activity)?;
        server.count_among(clients);
        // The image's path is looked up here, on the disk's thread: its file server may give no answer.
        let kept = config.kept.as_ref();
        if let Some(kept) = kept.and_then(|(disk, image)| config.inherited.kept(disk, image)) {
            server.keep_in(&kept);
        }
        if let Some(uuid) = config.domain.clone() {
            server.admit(Box::new(move |connection| front_end::may_connect(connection, &uuid)));
        }
        if let Some(path) = &config.lent {
            let noted = noted_queues(path).and_then(|file| server.note_queues_in(file));
            self.lent = noted.is_ok().then(|| path.clone());
            if let Err(error) = noted {
                tracing::warn!(
                    "{}: {error}: a server after this one will not know which queues of the disk ran, and could let its VM be \
                     moved when it must not be",
                    path.display()
                );
            }
        }
        self.places.vhost_user = Some(match at {
            VhostUserAt::Path(path) => command_line(&[path.into()]),
            VhostUserAt::Descriptor(descriptor) => format!("fd {}", descriptor.as_raw_fd()),
        });
        let theirs = Rc::clone(&server);
        self.socket = Some(match at {
            VhostUserAt::Path(path) => path.display().to_string(),
            VhostUserAt::Descriptor(descriptor) => format!("fd {}", descriptor.as_raw_fd()),
        });
        let listening = rustix::net::sockopt::socket_acceptconn(&descriptor).map_err(io::Error::from)?;
        let gate = config.gate.clone();
        let accepting = if listening {
            let listener = Listener::from_descriptor(on, descriptor)?;
            on.spawn_with_result(async move {
                opened(gate).await;
                theirs.run(&listener).await
            })
        } else {
            let socket = Socket::from_descriptor(on, descriptor)?;
            on.spawn_with_result(async move {
                opened(gate).await;
                theirs.serve(socket).await;
                Ok(())
            })
        };
        self.accepting.replace(Some(accepting));
        self.vhost_user = Some(server);
        Ok(())
    }

    fn start_nbd(
        &mut self,
        on: &Loop,
        device: &Rc<dyn BlockDevice>,
        at: &NbdAt,
        options: NbdServerOptions,
        listeners: Vec<OwnedFd>,
        config: &ExportsConfig,
    ) -> Result<(), ExportError> {
        let uri = uri_for_clients(&at.uri).to_string();
        self.places.nbd = Some(command_line(&[(&uri).into()]));
        self.uri = Some(uri);
        let server = Rc::new(NbdServer::new(on, Rc::clone(device), options));
        for descriptor in listeners {
            let listener = Listener::from_descriptor(on, descriptor)?;
            let (theirs, gate) = (Rc::clone(&server), config.gate.clone());
            on.spawn(async move {
                opened(gate).await;
                theirs.listen(listener);
            });
        }
        self.nbd = Some(server);
        Ok(())
    }

    /// Has no queue of a guest take a request, or has them go on.
    pub fn rest(&self, rests: bool) {
        if let Some(server) = &self.vhost_user {
            server.rest(rests);
        }
    }

    /// Whether a guest has its queues started.
    pub fn is_at_work(&self) -> bool {
        self.vhost_user.as_ref().is_some_and(|server| server.is_at_work())
    }

    /// A guest's queue that its front-end has not taken back, and is elsewhere than that thinks.
    pub fn not_taken_back(&self) -> Option<u16> {
        self.vhost_user.as_ref().and_then(|server| server.not_taken_back())
    }

    /// How they are used.
    pub fn state(&self) -> ExportsState {
        let vhost_user = self.socket.clone().zip(self.vhost_user.as_ref());
        let nbd = self.uri.clone().zip(self.nbd.as_ref());
        ExportsState {
            vhost_user: vhost_user.map(|(socket, server)| VhostUserState {
                socket,
                connected: server.is_connected(),
            }),
            nbd: nbd.map(|(uri, server)| NbdState {
                uri,
                clients: server.statistics().connections as u64,
            }),
        }
    }

    /// Completes when an export has ended by itself: its socket broke, or its only front-end has gone. Never, if there
    /// is none that could.
    ///
    /// # Errors
    /// Its socket broke.
    pub async fn ended(&self) -> io::Result<()> {
        let accepting = self.accepting.borrow_mut().take();
        match accepting {
            Some(accepting) => accepting.await,
            None => std::future::pending().await,
        }
    }

    /// Takes no new requests, answers those under way, and closes; a front-end's connection as `how` says.
    pub async fn stop(&self, on: &Loop, how: Stop) {
        if let Some(server) = &self.vhost_user {
            server.stop(how);
            while server.is_connected() {
                on.sleep(Duration::from_millis(1)).await;
            }
            if let Some(path) = self.lent.as_ref().filter(|_| server.all_taken_back()) {
                // It says nothing that is not so without it.
                let _ = std::fs::remove_file(path);
            }
        }
        if let Some(server) = &self.nbd {
            server.stop().await;
        }
        self.files.take();
    }
}

/// Opens the file of such queues; the folder above its own is there.
fn noted_queues(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        runtime_folder::make(folder, 0o700)?;
    }
    let mut how = File::options();
    how.read(true).write(true).create(true).truncate(false).mode(0o600);
    how.open(path)
}

/// How clients name an export that is served at `uri`: the certificates are not theirs.
fn uri_for_clients(uri: &NbdUri) -> NbdUri {
    let mut theirs = uri.clone();
    if let Some(tls) = &mut theirs.tls {
        tls.certificates = None;
    }
    theirs
}

fn server_tls(uri: &NbdUri) -> Result<Option<ServerTls>, ExportError> {
    let Some(tls) = &uri.tls else {
        return Ok(None);
    };
    if tls.hostname.is_some() {
        return Err(ExportError::ServerHostname { uri: uri.to_string() });
    }
    let folder = tls
        .certificates
        .as_ref()
        .ok_or_else(|| ExportError::NoCertificates { uri: uri.to_string() })?;
    let require_clients = opener::metadata(&folder.join("ca-cert.pem")).is_ok();
    Ok(Some(ServerTls::load_folder(folder, require_clients)?))
}

/// Listens on every address that the host's name stands for.
fn bind_tcp(host: &str, port: u16, open_to_others: bool) -> Result<Vec<OwnedFd>, ExportError> {
    let failed = |source| ExportError::Tcp {
        address: format!("{host}:{port}"),
        source,
    };
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(failed)?.collect();
    if let Some(address) = addresses
        .iter()
        .find(|address| !is_loopback(address.ip()) && !open_to_others)
    {
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

async fn opened(gate: Option<Latch<()>>) {
    if let Some(gate) = gate {
        gate.is_set().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_beyond_loopback_without_tls_is_refused() {
        assert!(matches!(
            bind_tcp("0.0.0.0", 0, false),
            Err(ExportError::Insecure { .. })
        ));
        assert!(matches!(bind_tcp("::", 0, false), Err(ExportError::Insecure { .. })));
        assert_eq!(bind_tcp("127.0.0.1", 0, false).expect("loopback is fine").len(), 1);
        assert_eq!(bind_tcp("0.0.0.0", 0, true).expect("the user said so").len(), 1);
    }
}

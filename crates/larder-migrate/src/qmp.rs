//! Client of the QEMU machine protocol (QMP), with the commands of a migration.
//!
//! One command is sent at a time, each with a time limit for the answer; events that arrive meanwhile are kept. Three
//! failures are distinguished: QEMU refuses, QEMU has exited, and QEMU has not answered yet, in which case it may
//! still carry out the command. Commands have ids, so that a late answer is not taken for that of another command.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

/// Time limit for the answer to a command.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit for QEMU to have no other client, and to greet this one.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a retry when QEMU's backlog of connections is full.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(20);
/// Maximum bytes of a line: a list of all devices of a large guest has some 100 KiB.
const LINE_MAX: usize = 16 << 20;
/// Maximum unanswered commands; no more are sent before QEMU answers.
const UNANSWERED_MAX: u64 = 32;
/// Maximum events kept; older ones are dropped.
const EVENTS_MAX: usize = 1024;

/// Reasons why QEMU did not carry out a command.
#[derive(Debug, Error)]
pub enum QmpError {
    /// The socket does not accept connections.
    #[error("cannot connect to QEMU's QMP socket {}: {source}; {}", path.display(), advice(path, source))]
    Connect {
        /// Path as given by the user.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// QEMU listens, but sends no greeting.
    #[error("QEMU does not answer at its QMP socket {}: does it have another client? It serves one at a time; give it a second socket with another -qmp", path.display())]
    Busy {
        /// Path as given by the user.
        path: PathBuf,
    },
    /// The connection broke, or QEMU has exited.
    #[error("QEMU has closed the connection (at its QMP socket {}, during '{command}'): {source}", path.display())]
    Disconnected {
        /// Path as given by the user.
        path: PathBuf,
        /// Name of the command.
        command: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// QEMU is alive, and has not answered yet.
    #[error("QEMU has not answered '{command}' in {} s (at its QMP socket {})", limit.as_secs(), path.display())]
    Timeout {
        /// Path as given by the user.
        path: PathBuf,
        /// Name of the command; it may still be carried out.
        command: String,
        /// Time limit that has passed.
        limit: Duration,
    },
    /// The bytes received are not QMP.
    #[error("the data from the QMP socket {} is no QMP: '{what}'; is it the path of -qmp unix:PATH,server=on,wait=off?", path.display())]
    NotQmp {
        /// Path as given by the user.
        path: PathBuf,
        /// First bytes received.
        what: String,
    },
    /// QEMU has answered with an error.
    #[error("QEMU refuses '{command}': {text}")]
    Refused {
        /// Name of the command.
        command: String,
        /// Text of QEMU's error.
        text: String,
    },
}

/// Event of QEMU.
#[derive(Clone, Debug)]
pub struct QmpEvent {
    /// Name, such as `STOP`.
    pub name: String,
    /// Data of the event.
    pub data: Value,
    /// Time of the event by the clock of QEMU's host, since 1970.
    pub at: Duration,
}

/// Connection to a QEMU's monitor.
pub struct Qmp {
    path: PathBuf,
    socket: UnixStream,
    received: Vec<u8>,
    events: VecDeque<QmpEvent>,
    version: [u64; 3],
    /// Number of commands sent.
    commands: u64,
    /// Number of answers received.
    answers: u64,
    /// True if QEMU can carry out some commands out of band.
    out_of_band: bool,
    process: Option<ProcessIdentity>,
}

/// Process, distinguished from later ones with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Process id.
    pub pid: i32,
    /// Start time in ticks since boot (proc(5), `starttime`).
    pub started: u64,
}

impl ProcessIdentity {
    /// Returns the process that has this pid now.
    #[must_use]
    pub fn with_pid(pid: i32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The command name before it may contain any characters.
        let (_, rest) = stat.rsplit_once(')')?;
        let mut fields = rest.split_whitespace();
        // A zombie has ended.
        if fields.next()? == "Z" {
            return None;
        }
        let started = fields.nth(18)?.parse().ok()?;
        Some(Self { pid, started })
    }

    /// Returns the user that the process runs as.
    fn user(self) -> Option<u32> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }

    /// Returns true if the process has not ended.
    #[must_use]
    pub fn is_alive(self) -> bool {
        Self::with_pid(self.pid) == Some(self)
    }
}

impl QmpError {
    /// Returns true if QEMU will not answer any more.
    #[must_use]
    pub const fn is_disconnected(&self) -> bool {
        matches!(self, Self::Disconnected { .. } | Self::Connect { .. } | Self::NotQmp { .. })
    }
}

/// Connects to a UNIX socket. Returns [`io::ErrorKind::WouldBlock`] if its backlog stays full until `until`.
fn connect_socket(path: &Path, until: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => {
                let socket = UnixStream::from(socket);
                socket.set_nonblocking(false)?;
                return Ok(socket);
            }
            Err(Errno::AGAIN) if Instant::now() < until => std::thread::sleep(CONNECT_RETRY_DELAY),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns advice about a path that cannot be connected to.
fn advice(path: &Path, error: &io::Error) -> &'static str {
    let is_not_socket = path.metadata().is_ok_and(|found| !found.file_type().is_socket());
    match error.kind() {
        _ if is_not_socket => "it is no socket: give the path of -qmp unix:PATH,server=on,wait=off",
        io::ErrorKind::ConnectionRefused => "no process listens there: has its QEMU exited?",
        io::ErrorKind::PermissionDenied => "run this as QEMU's user, or as root",
        io::ErrorKind::InvalidFilename => "the kernel takes at most 107 bytes for the path of a socket",
        _ => "is it the path of -qmp unix:PATH,server=on,wait=off?",
    }
}

impl Qmp {
    /// Connects, reads the greeting, and negotiates capabilities.
    ///
    /// # Errors
    /// There is no QEMU, or it has another client.
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        let failed = |source| QmpError::Connect { path: path.to_owned(), source };
        let socket = connect_socket(path, Instant::now() + GREETING_TIMEOUT).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => QmpError::Busy { path: path.to_owned() },
            _ => failed(error),
        })?;
        socket.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(failed)?;
        let peer = rustix::net::sockopt::socket_peercred(&socket).ok();
        let mut qmp = Self {
            path: path.to_owned(),
            socket,
            received: Vec::new(),
            events: VecDeque::new(),
            version: [0; 3],
            commands: 0,
            answers: 0,
            out_of_band: false,
            process: peer.and_then(|peer| ProcessIdentity::with_pid(peer.pid.as_raw_nonzero().get())),
        };
        let greeting = match qmp.next_message("the greeting", Instant::now() + GREETING_TIMEOUT)? {
            Some(greeting) => greeting,
            None => return Err(QmpError::Busy { path: path.to_owned() }),
        };
        if !greeting["QMP"].is_object() {
            return Err(qmp.not_qmp(greeting.to_string().as_bytes()));
        }
        let version = &greeting["QMP"]["version"]["qemu"];
        qmp.version = ["major", "minor", "micro"].map(|part| version[part].as_u64().unwrap_or(0));
        let offered = greeting["QMP"]["capabilities"].as_array();
        qmp.out_of_band = offered.is_some_and(|offered| offered.iter().any(|it| it == "oob"));
        let enable = if qmp.out_of_band { json!(["oob"]) } else { json!([]) };
        qmp.execute("qmp_capabilities", json!({"enable": enable}))?;
        Ok(qmp)
    }

    /// Returns the path given to [`Self::connect`].
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the process that listens at the socket: QEMU, or the process that created the socket for it.
    #[must_use]
    pub const fn process(&self) -> Option<ProcessIdentity> {
        self.process
    }

    /// Returns the user that QEMU runs as, which may differ from the user that it started as and that owns its
    /// socket.
    #[must_use]
    pub fn user(&self) -> u32 {
        let runs_as = self.process.and_then(ProcessIdentity::user);
        let creator = || rustix::net::sockopt::socket_peercred(&self.socket).map(|peer| peer.uid.as_raw());
        runs_as.unwrap_or_else(|| creator().unwrap_or_else(|_| rustix::process::geteuid().as_raw()))
    }

    /// Returns QEMU's version: major, minor, micro.
    #[must_use]
    pub const fn version(&self) -> [u64; 3] {
        self.version
    }

    /// Sends a command to QEMU and returns the answer.
    ///
    /// # Errors
    /// QEMU refuses, has exited, or does not answer within 20 s.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, ANSWER_TIMEOUT)
    }

    /// Sends a command to QEMU and returns the answer, with another time limit.
    ///
    /// # Errors
    /// QEMU refuses, has exited, or does not answer within `limit`.
    pub fn execute_within(&mut self, command: &str, arguments: Value, limit: Duration) -> Result<Value, QmpError> {
        self.send_command("execute", command, &arguments, limit)
    }

    /// Makes QEMU quit; returns true if it has exited within `limit`.
    pub fn quit(&mut self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        // QEMU closes the connection, sometimes before it has answered.
        let mut result = self.execute_within("quit", json!({}), limit).map(|_| ());
        loop {
            match result {
                Err(error) if error.is_disconnected() => return true,
                _ if Instant::now() >= until => return false,
                _ => result = self.event(until.saturating_duration_since(Instant::now())).map(|_| ()),
            }
        }
    }

    /// Sends one of the few commands that QEMU can carry out out of band, ahead of earlier ones; in band if this QEMU
    /// cannot. While QEMU waits for guest memory from the other host, it carries out no other commands.
    ///
    /// # Errors
    /// Same as [`Self::execute`].
    pub fn execute_out_of_band(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let verb = if self.out_of_band { "exec-oob" } else { "execute" };
        self.send_command(verb, command, &arguments, ANSWER_TIMEOUT)
    }

    fn send_command(
        &mut self,
        verb: &str,
        command: &str,
        arguments: &Value,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        let until = Instant::now() + limit;
        let mut number = None;
        loop {
            if number.is_none() && self.commands - self.answers < UNANSWERED_MAX {
                self.commands += 1;
                number = Some(self.commands);
                let text = format!("{}\n", json!({verb: command, "arguments": arguments, "id": number}));
                self.socket.write_all(text.as_bytes()).map_err(|source| self.disconnected(command, source))?;
            }
            let Some(mut message) = self.next_message(command, until)? else {
                return Err(QmpError::Timeout { path: self.path.clone(), command: command.to_owned(), limit });
            };
            if message.get("event").is_some() {
                self.queue_event(&message);
                continue;
            }
            self.answers = (self.answers + 1).min(self.commands);
            // Skip the late answer to an earlier command. QEMU answers text that it cannot parse without an id.
            if number.is_none() || message.get("id").is_some_and(|id| id.as_u64() != number) {
                continue;
            }
            if let Some(error) = message.get("error") {
                return Err(QmpError::Refused {
                    command: command.to_owned(),
                    text: error["desc"].as_str().unwrap_or("no reason").to_owned(),
                });
            }
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }

    /// Returns the next event that was not taken yet, if there is one within `wait`.
    ///
    /// # Errors
    /// QEMU has exited.
    pub fn event(&mut self, wait: Duration) -> Result<Option<QmpEvent>, QmpError> {
        let until = Instant::now() + wait;
        while self.events.is_empty() {
            let Some(message) = self.next_message("waiting for events", until)? else {
                return Ok(None);
            };
            self.queue_event(&message);
        }
        Ok(self.events.pop_front())
    }

    fn queue_event(&mut self, message: &Value) {
        let Some(name) = message["event"].as_str() else { return };
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        let part = |name: &str| message["timestamp"][name].as_u64().and_then(|part| u32::try_from(part).ok());
        self.events.push_back(QmpEvent {
            name: name.to_owned(),
            data: message["data"].clone(),
            at: Duration::from_secs(part("seconds").unwrap_or(0).into())
                + Duration::from_micros(part("microseconds").unwrap_or(0).into()),
        });
    }

    /// Returns the next line, parsed as JSON; `None` after `until`.
    fn next_message(&mut self, command: &str, until: Instant) -> Result<Option<Value>, QmpError> {
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return serde_json::from_slice(&line).map(Some).map_err(|_| self.not_qmp(&line));
            }
            if self.received.len() > LINE_MAX {
                return Err(self.not_qmp(&self.received));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.socket.set_read_timeout(Some(left)).map_err(|source| self.disconnected(command, source))?;
            let mut piece = [0; 64 << 10];
            match self.socket.read(&mut piece) {
                Ok(0) => return Err(self.disconnected(command, io::ErrorKind::UnexpectedEof.into())),
                Ok(len) => self.received.extend_from_slice(&piece[..len]),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.disconnected(command, source)),
            }
        }
    }

    fn disconnected(&self, command: &str, source: io::Error) -> QmpError {
        QmpError::Disconnected { path: self.path.clone(), command: command.to_owned(), source }
    }

    fn not_qmp(&self, bytes: &[u8]) -> QmpError {
        let start = String::from_utf8_lossy(&bytes[..bytes.len().min(80)]);
        QmpError::NotQmp { path: self.path.clone(), what: start.trim_end().escape_debug().to_string() }
    }

    /// Returns QEMU's run state: `running`, `paused`, `inmigrate`, `postmigrate`, ...
    ///
    /// # Errors
    /// Same as [`Self::execute`].
    pub fn run_state(&mut self) -> Result<String, QmpError> {
        let status = self.execute("query-status", json!({}))?;
        Ok(status["status"].as_str().unwrap_or("unknown").to_owned())
    }

    /// Returns the answer of `query-migrate`.
    ///
    /// # Errors
    /// Same as [`Self::execute`].
    pub fn migration(&mut self) -> Result<Value, QmpError> {
        self.execute("query-migrate", json!({}))
    }

    /// Returns the migration capabilities that this QEMU knows, and whether they are enabled.
    ///
    /// # Errors
    /// Same as [`Self::execute`].
    pub fn capabilities(&mut self) -> Result<Vec<(String, bool)>, QmpError> {
        let list = self.execute("query-migrate-capabilities", json!({}))?;
        let entries = list.as_array().into_iter().flatten();
        Ok(entries
            .filter_map(|entry| Some((entry["capability"].as_str()?.to_owned(), entry["state"] == true)))
            .collect())
    }

    /// Enables or disables migration capabilities by name.
    ///
    /// # Errors
    /// Same as [`Self::execute`]; QEMU refuses a capability that it lacks, by name.
    pub fn set_capabilities(&mut self, capabilities: &[(String, bool)]) -> Result<(), QmpError> {
        let list: Vec<Value> = capabilities.iter().map(|(name, on)| json!({"capability": name, "state": on})).collect();
        self.execute("migrate-set-capabilities", json!({"capabilities": list})).map(|_| ())
    }
}

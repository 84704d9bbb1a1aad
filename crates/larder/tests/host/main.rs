//! `larder host`: VMs are detected and reported to Prometheus and browsers, also after failures. All processes run as
//! an ordinary user with directories of its own.

mod access;
mod balance;
mod browser;
mod memory;
mod metrics;
mod migration;
mod packaged;
mod places;
mod readers;
#[path = "../support/mod.rs"]
mod support;
mod web_driver;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use larder_bench::campaign::process::{Process, killed_with_parent};
use serde_json::Value;
use support::{TEST_TIMEOUT, larder_path, run_tool, temp_dir_on_tmpfs};
use tempfile::TempDir;
use web_driver::Browser;

/// Debian's `nobody`, for tests that run as root.
const NOBODY: u32 = 65534;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Repeats `try_it` until it returns a value.
fn until<T>(what: &str, mut try_it: impl FnMut() -> Option<T>) -> T {
    let give_up = Instant::now() + TEST_TIMEOUT;
    loop {
        if let Some(found) = try_it() {
            return found;
        }
        assert!(Instant::now() < give_up, "{what} does not come");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns a port that was free just now.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    listener.local_addr().expect("has one").port()
}

/// A user with VMs.
struct User {
    /// Sockets and files of VMs, on tmpfs.
    folder: TempDir,
    images: TempDir,
}

impl User {
    fn new() -> Self {
        let user = Self {
            folder: temp_dir_on_tmpfs(),
            // The user can reach this directory even if the project is in root's home.
            images: tempfile::tempdir_in("/var/tmp").expect("a folder in /var/tmp"),
        };
        for folder in [user.folder.path(), user.images.path()] {
            std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).expect("ours");
        }
        for name in ["run", "run/larder", "config", "config/larder", "config/larder/vms", "state"] {
            std::fs::create_dir(user.folder.path().join(name)).expect("a folder");
        }
        for name in ["run", "run/larder"] {
            let mode = PermissionsExt::from_mode(0o700);
            std::fs::set_permissions(user.folder.path().join(name), mode).expect("ours");
            user.own(&user.folder.path().join(name));
        }
        user.own(&user.folder.path().join("state"));
        user.own(user.images.path());
        user
    }

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    /// Makes the user the owner of a file.
    fn own(&self, path: &Path) {
        if Self::is_root() {
            chown(path, Some(NOBODY), Some(NOBODY)).expect("root may");
        }
    }

    /// Returns the program as this user runs it.
    fn larder(&self, arguments: &[&str]) -> Command {
        let mut command = if Self::is_root() {
            let mut command = Command::new("setpriv");
            let nobody = NOBODY.to_string();
            command.args(["--reuid", &nobody, "--regid", &nobody, "--clear-groups", "--"]);
            command.arg(larder_path());
            command
        } else {
            Command::new(larder_path())
        };
        command.args(arguments);
        command.env("XDG_RUNTIME_DIR", self.folder.path().join("run"));
        command.env("XDG_CONFIG_HOME", self.folder.path().join("config"));
        command.env("STATE_DIRECTORY", self.folder.path().join("state"));
        command
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.folder.path().join("run/larder").join(name)
    }

    fn file(&self, name: &str) -> PathBuf {
        let files = self.folder.path().join("config/larder/vms");
        files.join(format!("{name}.toml"))
    }

    /// Writes a VM's file: a raw disk with an NBD export, and further lines about the disk.
    fn write(&self, name: &str, of_disk: &str) {
        let image = self.images.path().join(format!("{name}.raw"));
        let disk = std::fs::File::create(&image).expect("an image");
        disk.set_len(64 << 20).expect("an image");
        self.own(&image);
        let file = format!(
            "uuid = \"2c9d6f3e-8c54-4d6a-9c0e-5f2b6c1d7a10\"\n[[disk]]\nimage = \"{}\"\nformat = \"raw\"\nnbd = \"{}\"\n{of_disk}\n",
            text(&image),
            self.nbd(name)
        );
        std::fs::write(self.file(name), file).expect("writes");
    }

    fn nbd(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", text(&self.socket(&format!("{name}.nbd"))))
    }

    fn start(&self, name: &str) -> Process {
        let process = Process::start(self.larder(&["vm", name])).expect("larder starts");
        process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
        process
    }

    /// Starts a VM with a raw disk.
    fn vm(&self, name: &str) -> Process {
        self.write(name, "");
        self.start(name)
    }

    /// Starts a VM with a raw disk and a cache on the same device.
    fn cached_vm(&self, name: &str) -> Process {
        let cache = self.images.path().join(format!("{name}.cache"));
        let socket = self.socket(&format!("{name}-vda.sock"));
        let more = format!("socket = \"{}\"\niops-total = 1000000\ncache-endurance = \"1TiB\"\n", text(&socket));
        self.write(name, &format!("{more}cache = \"{}\"\ncache-size = \"32MiB\"\n", text(&cache)));
        self.start(name)
    }

    /// Returns the state of a VM's first disk from the VM's own control socket.
    fn disk(&self, name: &str) -> Value {
        let socket = self.socket(&format!("{name}.sock"));
        let told = run_tool("curl", &["-sS", "--unix-socket", text(&socket), "http://x/v1/disks/0"]);
        serde_json::from_str(&told).expect("it is JSON")
    }

    fn host(&self, options: &[&str]) -> Host {
        let all = [&["host", "--listen", "127.0.0.1:0"], options].concat();
        let process = Process::start(self.larder(&all)).expect("larder starts");
        let line = process.wait_for(" ready ", TEST_TIMEOUT).expect("it listens");
        let (_, rest) = line.split_once("://").expect("a URL");
        let address = rest.split('/').next().expect("an address").parse().expect("an address");
        let token = self.token();
        Host { process, address, token }
    }

    /// Returns the token that this user's `larder host` created.
    fn token(&self) -> String {
        let token = std::fs::read_to_string(self.token_file()).expect("a token");
        token.trim_end().to_owned()
    }

    fn token_file(&self) -> PathBuf {
        self.folder.path().join("state/host-token")
    }
}

/// A running `larder host`.
struct Host {
    process: Process,
    address: SocketAddr,
    token: String,
}

impl Host {
    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Returns the header of a client that has the token.
    fn authorization(&self) -> String {
        format!("Authorization: Bearer {}\r\n", self.token)
    }

    /// Logs a browser in with the token.
    fn log_in(&self, browser: &Browser) {
        browser.log_in(&self.url(""), &self.token);
    }

    /// Sends bytes, and returns the whole answer.
    fn send(&self, bytes: &[u8]) -> String {
        let mut client = TcpStream::connect(self.address).expect("connects");
        client.set_read_timeout(Some(TEST_TIMEOUT)).expect("can be set");
        // The server may close the connection before it has read everything.
        let _ = client.write_all(bytes);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Returns the head and the body of the answer to `GET path` with these headers.
    fn get(&self, path: &str, headers: &[&str]) -> (String, String) {
        let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let token = self.authorization();
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{token}{headers}\r\n");
        let answer = self.send(request.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        (head.to_owned(), body.to_owned())
    }

    fn metrics(&self) -> String {
        let (head, body) = self.get("/metrics", &[]);
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        body
    }

    /// Returns the value of the sample with exactly this name and these labels.
    fn value(&self, sample: &str) -> Option<f64> {
        value_in(&self.metrics(), sample)
    }

    /// Subscribes to the stream of events that browsers get.
    fn follow(&self, path: &str) -> Frames {
        let mut client = TcpStream::connect(self.address).expect("connects");
        client.set_read_timeout(Some(TEST_TIMEOUT)).expect("can be set");
        let token = self.authorization();
        let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n{token}\r\n");
        client.write_all(request.as_bytes()).expect("takes it");
        Frames(BufReader::new(client))
    }

    /// Returns the VM of that name from the fleet's events, once `is_wanted` holds for it.
    fn vm_when(&self, name: &str, is_wanted: impl Fn(&Value) -> bool) -> Value {
        let mut frames = self.follow("/api/fleet");
        until(&format!("{name} as it should be"), || {
            let frame = frames.next("fleet");
            let vms = frame["vms"].as_array().expect("a list").iter();
            vms.into_iter().find(|vm| vm["name"] == name && is_wanted(vm)).cloned()
        })
    }
}

fn value_in(metrics: &str, sample: &str) -> Option<f64> {
    let line = metrics.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '))?;
    Some(line.parse().expect("a number"))
}

/// Stream of server-sent events.
struct Frames(BufReader<TcpStream>);

impl Frames {
    /// Returns the data of the next event with that name.
    fn next(&mut self, wanted: &str) -> Value {
        let mut is_wanted = false;
        loop {
            let mut line = String::new();
            let count = self.0.read_line(&mut line).expect("is told");
            assert!(count > 0, "the stream has ended");
            if let Some(name) = line.strip_prefix("event: ") {
                is_wanted = name.trim_end() == wanted;
            } else if let (true, Some(data)) = (is_wanted, line.strip_prefix("data: ")) {
                return serde_json::from_str(data).expect("it is JSON");
            }
        }
    }
}

/// Returns a `fio` command for a VM's disk over NBD; it ends with the thread that starts it.
fn fio(uri: &str, options: &[&str]) -> Command {
    let mut command = killed_with_parent("nice");
    command.args(["-n", "19", "fio", "--name=load", "--ioengine=nbd", "--output-format=json"]);
    command.args(["--thread", "--size=64m", "--iodepth=8"]).arg(format!("--uri={uri}")).args(options);
    command
}

//! Read-only access to the VMs of a host, which the service has `larder host` run with.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use larder_bench::campaign::process::{Process, killed_with_parent};
use tempfile::TempDir;

use super::support::{TEST_TIMEOUT, larder_path, require_root, run_command, temp_dir_on_tmpfs};
use super::{text, until};

/// The user of the VMs' services.
const SERVICE: u32 = 64_001;
/// The read group.
const READ_GROUP: u32 = 64_002;
/// A group that a VM's file names.
const OPERATORS: u32 = 64_003;
/// An ordinary user in the read group.
const READER: u32 = 64_004;
/// An ordinary user in the group that a VM's file names.
const OPERATOR: u32 = 64_005;
/// An ordinary user in neither group.
const STRANGER: u32 = 64_006;

/// The user, the group and the supplementary groups of a process.
#[derive(Clone, Copy, Debug)]
struct Who {
    user: u32,
    group: u32,
    groups: &'static [u32],
}

const ROOT: Who = who(0, 0, &[]);
/// Reads by its primary group, as the unit's `Group=` configures.
const HOST: Who = who(READER, READ_GROUP, &[]);
/// Reads by a supplementary group, as after `usermod --append --groups`.
const MEMBER: Who = who(READER, READER, &[READ_GROUP]);

const fn who(user: u32, group: u32, groups: &'static [u32]) -> Who {
    Who { user, group, groups }
}

/// A host with its own `/run` and `/etc`, which processes see in mount namespaces.
struct World(TempDir);

impl World {
    fn new() -> Self {
        require_root("to be several users, and to have a /run of its own");
        let world = Self(temp_dir_on_tmpfs());
        for (folder, owner) in [
            (".", 0),
            ("run", 0),
            ("run/larder", SERVICE),
            ("run/larder-host", READER),
            ("etc", 0),
            ("etc/larder", 0),
            ("etc/larder/vms", 0),
            ("images", SERVICE),
            ("state", SERVICE),
            ("host", READER),
        ] {
            let path = world.path(folder);
            std::fs::create_dir_all(&path).expect("a folder");
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("root may");
            chown(&path, Some(owner), Some(owner)).expect("root may");
        }
        for name in ["passwd", "nsswitch.conf", "ld.so.cache", "hosts"] {
            let text = std::fs::read(format!("/etc/{name}")).unwrap_or_default();
            std::fs::write(world.path(&format!("etc/{name}")), text).expect("writes");
        }
        let groups = format!("root:x:0:\nlarder-read:x:{READ_GROUP}:\noperators:x:{OPERATORS}:\n");
        std::fs::write(world.path("etc/group"), groups).expect("writes");
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns a command that a user of the host runs.
    fn command(&self, who: Who, program: &Path, arguments: &[&str]) -> Command {
        let mount = r#"mount --bind "$0/run" /run && mount --bind "$0/etc" /etc && exec "$@""#;
        let mut command = killed_with_parent("unshare");
        command.args(["--mount", "--propagation", "private", "--", "sh", "-c", mount]);
        command.arg(self.0.path());
        command.args(["setpriv", "--reuid", &who.user.to_string(), "--regid", &who.group.to_string()]);
        match who.groups {
            [] => command.arg("--clear-groups"),
            groups => {
                let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
                command.args(["--groups", &groups.join(",")])
            }
        };
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(arguments);
        for variable in ["XDG_RUNTIME_DIR", "RUNTIME_DIRECTORY", "STATE_DIRECTORY"] {
            command.env_remove(variable);
        }
        command.env("HOME", "/nonexistent");
        command
    }

    fn larder(&self, who: Who, arguments: &[&str]) -> Command {
        self.command(who, larder_path(), arguments)
    }

    /// Starts the server of a VM as its service would, with `more` in the VM's file.
    fn vm(&self, name: &str, more: &str) -> Process {
        let image = self.path(&format!("images/{name}.raw"));
        std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("an image");
        chown(&image, Some(SERVICE), Some(SERVICE)).expect("root may");
        let file = self.path(&format!("etc/larder/vms/{name}.toml"));
        let words = format!("{more}\n[[disk]]\nimage = \"{}\"\nformat = \"raw\"\n", text(&image));
        std::fs::write(&file, words).expect("writes");
        let mut command =
            self.larder(who(SERVICE, SERVICE, &[]), &["vm", &format!("/etc/larder/vms/{name}.toml"), "--confine"]);
        command.env("RUNTIME_DIRECTORY", "/run/larder");
        command.env("STATE_DIRECTORY", self.path("state"));
        // The umask of the unit.
        let mut strict = Command::new("sh");
        strict.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => strict.env(name, value),
                None => strict.env_remove(name),
            };
        }
        let process = Process::start(strict).expect("larder starts");
        process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
        process
    }

    /// Returns the status and the body of a control socket's answer; status 0 means a refused connection.
    fn ask(&self, who: Who, socket: &str, options: &[&str]) -> (u32, String) {
        let socket = format!("/run/larder/{socket}.sock");
        let all =
            [&["-sS", "--max-time", "60", "--write-out", "\n%{http_code}", "--unix-socket", &socket], options].concat();
        let Output { stdout, .. } = self.command(who, Path::new("curl"), &all).output().expect("curl runs");
        let said = String::from_utf8_lossy(&stdout).into_owned();
        let (body, status) = said.rsplit_once('\n').expect("a status");
        (status.parse().expect("a number"), body.to_owned())
    }
}

const DISK: &str = "http://localhost/v1/disks/vda";

/// Readers get answers to GET and 403 to every other method, and the VM stays unchanged.
#[test]
fn readers_are_refused_every_change() {
    let world = World::new();
    let _web = world.vm("web", "");
    for who in [HOST, MEMBER] {
        for path in ["v1", "v1/disks", "v1/disks/vda", "v1/openapi.json", "v1/disks/vda/hot"] {
            let (status, body) = world.ask(who, "web", &[&format!("http://localhost/{path}")]);
            assert_eq!(status, 200, "{who:?}: {path}: {body}");
        }
        for (method, path, body) in [
            ("PATCH", "v1/disks/vda", r#"{"limits":{"iops-total":1000}}"#),
            ("POST", "v1/disks/vda/cache/flush", ""),
            ("POST", "v1/disks/vda/cache/replace", "{}"),
            ("POST", "v1/disks/vda/hot", r#"{"ranges":""}"#),
            ("POST", "v1/reload", ""),
            ("POST", "v1/move", r#"{"step":"leave"}"#),
            ("PATCH", "v1/memory", r#"{"budget":1073741824}"#),
            ("POST", "v1/memory/detach", ""),
            ("POST", "v1/memory/detach/cancel", ""),
            ("PATCH", "v1/migration", r#"{"bandwidth":1}"#),
            ("POST", "v1/migration/cancel", ""),
            ("DELETE", "v1", ""),
            ("PUT", "nothing", ""),
        ] {
            let url = format!("http://localhost/{path}");
            let (status, said) = world.ask(who, "web", &["-X", method, "-d", body, &url]);
            assert_eq!(status, 403, "{who:?}: {method} {path}: {said}");
            assert!(said.contains("this client may only read"), "{said}");
        }
    }
    let (_, disk) = world.ask(ROOT, "web", &[DISK]);
    assert!(!disk.contains("1000"), "{disk}");
}

/// The server's user, root and the group in the VM's file may change a VM; a user in no such group cannot connect.
#[test]
fn writers_change_and_strangers_cannot_connect() {
    let world = World::new();
    let _web = world.vm("web", "control-group = \"operators\"\ncontrol-mode = \"0660\"");
    let _db = world.vm("db", "");
    let operator = who(OPERATOR, OPERATOR, &[OPERATORS]);
    let operator_by_first_group = who(OPERATOR, OPERATORS, &[]);
    // A reader by one group that may change by another one.
    let both = who(OPERATOR, READ_GROUP, &[OPERATORS]);
    let change = |who, vm, limit: u32| {
        let body = format!(r#"{{"limits":{{"iops-total":{limit}}}}}"#);
        world.ask(who, vm, &["-X", "PATCH", "-d", &body, DISK])
    };
    let service = who(SERVICE, SERVICE, &[]);
    for (limit, who) in (1_000..).zip([ROOT, service, operator, operator_by_first_group, both]) {
        let (status, said) = change(who, "web", limit);
        assert!(status == 200 && said.contains(&limit.to_string()), "{who:?}: {status} {said}");
    }
    assert_eq!(change(HOST, "web", 7).0, 403);
    for (who, wanted) in [(ROOT, 200), (service, 200), (HOST, 403), (operator, 0), (both, 403)] {
        let (status, said) = change(who, "db", 2_000);
        assert_eq!(status, wanted, "{who:?}: {said}");
    }
    let stranger = who(STRANGER, STRANGER, &[]);
    for vm in ["web", "db"] {
        assert_eq!(world.ask(stranger, vm, &[DISK]).0, 0);
    }
}

/// A member of the read group sees the VMs of the host's services in `larder host` and in `larder status`.
#[test]
fn readers_host_sees_all_services() {
    let world = World::new();
    let _web = world.vm("web", "");
    // The socket is in another directory: `larder host` finds it by the VM's file, and `larder status` by the note.
    let elsewhere = world.path("state/other.sock");
    let _db = world.vm("db", &format!("control = \"{}\"", text(&elsewhere)));
    let socket = world.path("host/socket");
    let mut command = world.larder(HOST, &["host", "--listen", text(&socket), "--socket-mode", "0660"]);
    // The unit sets the same variables.
    command.env("XDG_CONFIG_HOME", "/etc");
    command.env("RUNTIME_DIRECTORY", "/run/larder-host");
    let host = Process::start(command).expect("larder starts");
    host.wait_for(" ready ", TEST_TIMEOUT).expect("listens");
    let metrics = || {
        let all = ["-sS", "--unix-socket", text(&socket), "http://localhost/metrics"];
        let output = world.command(MEMBER, Path::new("curl"), &all).output().expect("curl runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    until("both VMs", || {
        let metrics = metrics();
        let is_up = |vm: &str| metrics.contains(&format!("larder_vm_up{{domain=\"{vm}\"}} 1"));
        (is_up("web") && is_up("db")).then_some(())
    });
    // The VM's file leads to its server, not to the reader's own directory.
    let metrics = metrics();
    assert!(metrics.contains("larder_host_sockets{state=\"stopped\"} 0"), "{metrics}");
    let (code, said) = run_command(world.larder(MEMBER, &["status"]));
    assert!(code == Some(0) && said.contains("web") && said.contains("db"), "{code:?}: {said}");
    let (code, said) = run_command(world.larder(MEMBER, &["status", "web"]));
    assert!(code == Some(0) && said.contains("raw"), "{code:?}: {said}");
    let (code, said) = run_command(
        world.larder(MEMBER, &["memory", "limit", "--control", "/run/larder/web.sock", "--budget", "1GiB"]),
    );
    assert!(code == Some(2) && said.contains("this client may only read"), "{code:?}: {said}");
    let stranger = who(STRANGER, STRANGER, &[]);
    let (_, said) = run_command(world.larder(stranger, &["status"]));
    assert!(!said.contains("web") && !said.contains("db"), "{said}");
}

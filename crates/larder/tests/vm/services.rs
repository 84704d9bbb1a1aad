//! Services of VMs, each with its own user, whose files the opener of the host's services opens: the reach of an
//! attacker who has taken one of them over.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::process::{Process, killed_with_parent};
use tempfile::TempDir;

use crate::support::{
    TEST_TIMEOUT, assert_io_works, larder_path, require_root, run_command, temp_dir_on_disk, temp_dir_on_tmpfs,
    wait_until,
};
use crate::{ends, text};

/// Script that sets the namespace up. `$1` is the test's directory. The control groups are systemd's of version 1,
/// which the opener uses where they exist.
const SET_UP: &str = r#"
set -e
mkdir "$1/etc"
cp -a /etc/. "$1/etc"
mount --bind "$1/etc" /etc
for folder in /run /var/lib /tmp /root; do mount -t tmpfs -o mode=755 tmpfs $folder; done
mkdir -p /etc/larder/vms /run/larder /run/larder-vm /var/lib/larder-vm /run/groups
rm -f /etc/larder/vms/*
mount -t cgroup -o none,name=systemd systemd /run/groups
echo SET-UP
while :; do sleep 1; done
"#;

/// Script that does the same as `larder-open.socket` and `larder-open@.service`.
const OPENER: &str = r#"
exec systemd-socket-activate --seqpacket --accept --inetd --listen /run/larder-open.sock larder open
"#;

/// Script that does the same as `larder@.service`. `$1` is the VM, `$2` its user.
const SERVICE: &str = r#"
set -e
group="/run/groups/system.slice/system-larder.slice/larder@$1.service"
mkdir -p "$group"
echo $$ >"$group/cgroup.procs"
install -d -m 700 -o "$2" -g "$2" "/run/larder-vm/$1" "/var/lib/larder-vm/$1"
chmod 666 /run/larder-open.sock
export RUNTIME_DIRECTORY="/run/larder-vm/$1" STATE_DIRECTORY="/var/lib/larder-vm/$1"
exec setpriv --reuid "$2" --regid "$2" --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
  larder vm "/etc/larder/vms/$1.toml" --confine --opener /run/larder-open.sock
"#;

/// Script that asks the opener for files, as a process in the control group of VM `$1`. Each request is the access and
/// the path; `:by-header` after the access claims that an image's header names the path.
const ASK: &str = r#"
set -e
echo $$ >"/run/groups/system.slice/system-larder.slice/larder@$1.service/cgroup.procs"
shift
exec python3 - "$@" <<'END'
import array, json, socket, sys
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel.connect('/run/larder-open.sock')
for wish in sys.argv[1:]:
    access, path = wish.split(' ', 1)
    access, _, source = access.partition(':')
    path = list(path.encode())
    if access in ('Make', 'Remove', 'Connect', 'Canonical', 'Listen', 'MarkUsed'):
        request = {access: path}
    else:
        request = {'Open': {'path': path, 'access': access, 'by_header': source == 'by-header'}}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rights = array.array('i', [theirs.fileno()])
    channel.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    theirs.close()
    answer = ours.recv(65536)
    print(wish, json.loads(answer) if answer else 'closed')
END
"#;

struct Host {
    _namespace: Process,
    opener: Process,
    /// PID of the namespace's init process.
    init: u32,
    folder: TempDir,
    images: TempDir,
    names: Vec<String>,
}

/// The service of a VM.
struct Service {
    name: String,
    process: Process,
}

impl Host {
    fn new() -> Self {
        require_root("for services");
        let (folder, images) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
        for folder in [folder.path(), images.path()] {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("is ours");
        }
        let mut command = killed_with_parent("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", SET_UP, "sh"]).arg(folder.path());
        let namespace = Process::start(command).expect("a namespace");
        namespace.wait_for("SET-UP", TEST_TIMEOUT).expect("is set up");
        let init = namespace.id();
        let opener = Process::start(inside(init, OPENER, &[])).expect("it starts");
        opener
            .wait_for("Listening on", TEST_TIMEOUT)
            .expect("systemd-socket-activate listens; testbed/setup.sh installs what the tests need");
        Self { _namespace: namespace, opener, init, folder, images, names: Vec::new() }
    }

    /// Returns the path by which this process reaches a path of the host.
    fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Starts the service of a VM with a cached raw disk and a qcow2 disk, whose files belong to root.
    fn service(&mut self, name: &str, user: u32) -> Service {
        let name = format!("{name}-{}", std::process::id());
        let at = |what: &str| self.images.path().join(format!("{name}.{what}"));
        let (raw, qcow2, cache) = (at("raw"), at("qcow2"), at("cache"));
        let file = fs::File::create(&raw).expect("an image");
        file.set_len(8 << 20).expect("an image");
        crate::run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&qcow2), "8M"]);
        for image in [&raw, &qcow2] {
            fs::set_permissions(image, fs::Permissions::from_mode(0o600)).expect("is ours");
        }
        let vm = format!(
            "[[disk]]\nname = \"vda\"\nimage = \"{}\"\nformat = \"raw\"\ncache = \"{}\"\ncache-size = \"16M\"\n\
             [[disk]]\nname = \"vdb\"\nimage = \"{}\"\nformat = \"qcow2\"\n",
            raw.display(),
            cache.display(),
            qcow2.display()
        );
        let path = self.path(&format!("/etc/larder/vms/{name}.toml"));
        fs::write(&path, vm).expect("writes");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("is ours");
        self.names.push(name.clone());
        let process = self.start(&name, user);
        Service { name, process }
    }

    fn start(&self, name: &str, user: u32) -> Process {
        let process = Process::start(inside(self.init, SERVICE, &[name, &user.to_string()])).expect("larder starts");
        process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
        process
    }

    fn disk(&self, name: &str, disk: &str) -> FrontEnd {
        let socket = self.path(&format!("/run/larder/{name}-{disk}.sock"));
        FrontEnd::connect(&socket, Options::default()).expect("connects")
    }

    /// Returns all files in a directory of the host and its subdirectories.
    fn files(&self, folder: &str) -> Vec<String> {
        let mut all = Vec::new();
        for entry in fs::read_dir(self.path(folder)).into_iter().flatten().flatten() {
            let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => all.extend(self.files(&path)),
                _ => all.push(path),
            }
        }
        all
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for name in &self.names {
            let group = self.path(&format!("/run/groups/system.slice/system-larder.slice/larder@{name}.service"));
            // A process that is just exiting may still be in the group.
            let _ = fs::remove_dir(group);
        }
    }
}

fn inside(init: u32, script: &str, words: &[&str]) -> Command {
    let folder = larder_path().parent().expect("a folder").to_owned();
    let mut command = killed_with_parent("nsenter");
    command.args(["--target", &init.to_string(), "--mount", "--wd=/", "env"]);
    command.arg(format!("PATH={}:/usr/sbin:/usr/bin:/sbin:/bin", folder.display()));
    command.args(["sh", "-c", script, "sh"]).args(words);
    command
}

const USERS: [u32; 2] = [61_001, 61_002];

/// A service without rights serves the files that its VM's file names, and resumes after kills.
#[test]
fn unprivileged_service_serves_and_survives_kills() {
    let mut host = Host::new();
    let mut service = host.service("one", USERS[0]);
    let status = fs::read_to_string(format!("/proc/{}/status", service.process.id())).expect("it runs");
    assert!(status.contains(&format!("Uid:\t{}", USERS[0])), "{status}");
    for round in 1..4 {
        let mut guest = host.disk(&service.name, "vdb");
        assert_io_works(&mut guest, round);
        drop(guest);
        let mut guest = host.disk(&service.name, "vda");
        assert_io_works(&mut guest, round);
        service.process.kill();
        drop(guest);
        service.process = host.start(&service.name, USERS[0]);
    }
    assert!(!service.process.output().contains("WARN"), "{}", service.process.output());
    // Journals and notes belong to the service, sockets to root.
    let own: Vec<String> = ["/run/larder-vm", "/var/lib/larder-vm"].iter().flat_map(|it| host.files(it)).collect();
    assert!(own.iter().any(|it| it.ends_with(".journal")), "{own:?}");
    assert!(own.iter().any(|it| it.contains("/caches/")), "{own:?}");
    for path in &own {
        assert_eq!(host.path(path).symlink_metadata().expect("is there").uid(), USERS[0], "{path}");
    }
    let socket = host.path(&format!("/run/larder/{}-vda.sock", service.name));
    assert_eq!(socket.symlink_metadata().expect("is there").uid(), 0);
    ends(service.process);
    assert_eq!(host.files("/run/larder"), [""; 0], "sockets and notes are gone with the server");
}

/// The opener opens for a service only the files that its VM's file names, and only for the access that they need.
#[test]
fn the_opener_opens_nothing_else() {
    let mut host = Host::new();
    let [one, two] = [("one", USERS[0]), ("two", USERS[1])].map(|(name, user)| host.service(name, user));
    let image = |service: &Service, what: &str| {
        let path = host.images.path().join(format!("{}.{what}", service.name));
        text(&path).to_owned()
    };
    let own = [format!("Write {}", image(&one, "raw")), format!("Canonical {}", image(&one, "cache"))];
    let mut others = Vec::new();
    for path in [
        image(&two, "raw"),
        image(&two, "qcow2"),
        image(&two, "cache"),
        format!("/etc/larder/vms/{}.toml", two.name),
        format!("/run/larder/{}.sock", two.name),
        "/etc/shadow".to_owned(),
        "/proc/1/mem".to_owned(),
        "/dev/mem".to_owned(),
        format!("{}/../{}.raw", host.images.path().display(), two.name),
    ] {
        for access in ["Look", "Read", "Write", "Claim", "Make", "Remove", "Connect", "Canonical", "Listen", "MarkUsed"]
        {
            others.push(format!("{access} {path}"));
        }
    }
    others.push(format!("Claim {}", image(&one, "raw")));
    others.push(format!("Remove {}", image(&one, "raw")));
    others.push(format!("Make {}", image(&one, "qcow2")));
    let ask = |wishes: &[String]| {
        let words: Vec<&str> = [one.name.as_str()].into_iter().chain(wishes.iter().map(String::as_str)).collect();
        run_command(inside(host.init, ASK, &words))
    };
    let (code, said) = ask(&own);
    assert!(code == Some(0) && !said.contains("Failed"), "nothing would be shown by a failure: {said}");
    let (code, said) = ask(&others);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(said.lines().count(), others.len(), "{said}");
    for line in said.lines() {
        assert!(line.contains("'is_denied': True"), "{line}");
    }
    // A process that is no service gets nothing.
    let (code, said) = run_command(inside(
        host.init,
        &ASK.replace("echo $$ >\"/run/groups/system.slice/system-larder.slice/larder@$1.service/cgroup.procs\"\n", ""),
        &["x", &own[0]],
    ));
    assert!(code != Some(0) || said.contains("closed"), "{said}");
    ends(one.process);
    ends(two.process);
}

/// A user apart from those of the services, with links planted in the directories.
const ALICE: u32 = 61_003;

/// Creates a symbolic link of [`ALICE`].
fn plant(target: &Path, link: &Path) {
    symlink(target, link).expect("a link");
    lchown(link, Some(ALICE), Some(ALICE)).expect("root may");
}

/// A directory that is removed on drop, also when the test fails.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Host {
    /// Replaces the file of a VM.
    fn rewrite(&self, service: &Service, lines: &str) {
        let path = self.path(&format!("/etc/larder/vms/{}.toml", service.name));
        fs::write(path, lines).expect("writes");
    }

    /// Sends requests of [`ASK`] to the opener as a service; returns a line for each answer.
    fn ask(&self, service: &Service, wishes: &[String]) -> Vec<String> {
        let words = wishes.iter().map(String::as_str);
        let words: Vec<&str> = std::iter::once(service.name.as_str()).chain(words).collect();
        let (code, said) = run_command(inside(self.init, ASK, &words));
        assert_eq!(code, Some(0), "{said}");
        let lines: Vec<String> = said.lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), wishes.len(), "{said}");
        lines
    }
}

/// For a service, the opener follows no link of another user to any kind of file, whatever the request claims about
/// the source of the path. It follows links of root.
#[test]
fn opener_follows_no_foreign_link() {
    let mut host = Host::new();
    let mut service = host.service("one", USERS[0]);
    let alice = host.images.path().join("alice");
    fs::create_dir(&alice).expect("a folder");
    let secret = host.images.path().join("secret");
    fs::write(&secret, [0x5e; 1 << 20]).expect("writes");
    let at = |name: &str| text(&alice.join(name)).to_owned();
    for name in ["image", "base", "data", "base-data", "cache"] {
        plant(&secret, &alice.join(name));
    }
    plant(host.images.path(), &alice.join("folder"));
    symlink(&secret, alice.join("of-root")).expect("a link");
    chown(&alice, Some(ALICE), Some(ALICE)).expect("root may");
    let top = at("top.qcow2");
    crate::run_tool("qemu-img", &["create", "-q", "-u", "-f", "qcow2", "-b", &at("base"), "-F", "raw", &top, "1M"]);
    let disk =
        |name: &str, image: &str, lines: &str| format!("[[disk]]\nname = \"{name}\"\nimage = \"{image}\"\n{lines}\n");
    let disks = [
        disk("a", &at("image"), "format = \"raw\""),
        disk(
            "b",
            &top,
            &format!(
                "format = \"qcow2\"\nbacking = [{{ image = \"{}\", format = \"qcow2\", data-file = \"{}\" }}]",
                at("base"),
                at("base-data")
            ),
        ),
        disk(
            "c",
            &at("c.qcow2"),
            &format!(
                "format = \"qcow2\"\ndata-file = \"{}\"\nbacking = [{{ image = \"{}\", format = \"raw\" }}]",
                at("data"),
                at("of-root")
            ),
        ),
        disk(
            "d",
            &at("folder/d.raw"),
            &format!(
                "format = \"raw\"\ncache = \"{}\"\ncache-size = \"16M\"\nsocket = \"{}\"",
                at("cache"),
                at("folder/d.sock")
            ),
        ),
    ];
    host.rewrite(&service, &disks.concat());

    // A link in the directory in which this user's servers keep journals, named like the journal of an image.
    let journals = Removed(format!("/dev/shm/larder-{ALICE}").into());
    let _ = fs::remove_dir_all(&journals.0);
    fs::create_dir(&journals.0).expect("a folder");
    let found = fs::metadata(&top).expect("is there");
    let journal = journals.0.join(format!("qcow2-{:x}-{:x}.journal", found.dev(), found.ino()));
    plant(&secret, &journal);
    chown(&journals.0, Some(ALICE), Some(ALICE)).expect("root may");

    let mut wishes = Vec::new();
    for source in ["", ":by-header"] {
        for (path, accesses) in [
            (at("image"), &["Look", "Read", "Write"][..]),
            (at("base"), &["Look", "Read"]),
            (at("base-data"), &["Look", "Read"]),
            (at("data"), &["Look", "Read", "Write"]),
            (at("cache"), &["Look", "Read", "Write"]),
            (text(&journal).to_owned(), &["Look", "Read"]),
        ] {
            wishes.extend(accesses.iter().map(|access| format!("{access}{source} {path}")));
        }
    }
    wishes.push(format!("Canonical {}", at("base")));
    wishes.push(format!("Listen {}", at("folder/d.sock")));
    for line in host.ask(&service, &wishes) {
        assert!(line.contains("belongs to user 61003"), "{line}");
    }
    assert!(!host.images.path().join("d.sock").exists(), "nothing was created");
    let of_root = [format!("Read {}", at("of-root")), format!("Read:by-header {}", at("of-root"))];
    for line in host.ask(&service, &of_root) {
        assert!(!line.contains("Failed"), "{line}");
    }

    // The server itself, with a backing file behind the link, and behind a link of root.
    service.process.kill();
    let line = format!("format = \"qcow2\"\nbacking = [{{ image = \"{}\", format = \"raw\" }}]", at("base"));
    host.rewrite(&service, &disk("vda", &top, &line));
    let user = USERS[0].to_string();
    let (code, said) = run_command(inside(host.init, SERVICE, &[&service.name, &user]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("belongs to user 61003"), "{said}");
    lchown(alice.join("base"), Some(0), Some(0)).expect("root may");
    ends(host.start(&service.name, USERS[0]));
}

/// A link of another user at an image's path makes no journal and no state file of another VM accessible.
#[test]
fn foreign_link_reaches_no_other_journal() {
    let mut host = Host::new();
    let [one, two] = [("one", USERS[0]), ("two", USERS[1])].map(|(name, user)| host.service(name, user));
    for (number, disk) in ["vda", "vdb"].into_iter().enumerate() {
        assert_io_works(&mut host.disk(&two.name, disk), number as u64);
    }
    let found = |folder: &str, what: &str| {
        let mut files = host.files(folder).into_iter();
        files.find(|path| path.contains(what)).unwrap_or_else(|| panic!("no {what}"))
    };
    let journal = found(&format!("/run/larder-vm/{}", two.name), ".journal");
    let note = found(&format!("/var/lib/larder-vm/{}", two.name), "/caches/");
    let alice = host.images.path().join("alice");
    fs::create_dir(&alice).expect("a folder");
    for what in ["raw", "qcow2"] {
        plant(&host.images.path().join(format!("{}.{what}", two.name)), &alice.join(what));
    }
    let lines = ["raw", "qcow2"].map(|what| {
        let path = alice.join(what);
        format!("[[disk]]\nimage = \"{}\"\nformat = \"{what}\"\n", path.display())
    });
    host.rewrite(&one, &lines.concat());
    let wishes = [
        format!("Read {journal}"),
        format!("Read {note}"),
        format!("MarkUsed {note}"),
        format!("Remove {note}"),
        format!("Remove {journal}"),
    ];
    for line in host.ask(&one, &wishes) {
        assert!(line.contains("'is_denied': True"), "{line}");
    }
    assert!(host.path(&journal).exists() && host.path(&note).exists());
    assert!(!host.path(&note).with_extension("used").exists());
    // The rest shows that a link of root does lead there: otherwise the refusals would show nothing.
    for what in ["raw", "qcow2"] {
        lchown(alice.join(what), Some(0), Some(0)).expect("root may");
    }
    for line in host.ask(&one, &wishes[..2]) {
        assert!(!line.contains("Failed"), "{line}");
    }
    ends(one.process);
    ends(two.process);
}

/// strace of the files that programs open and create and of their connections; each name in the test's headers
/// contains `secret`.
const TRACE: &str = "strace -f -qq -s 4096 -e trace=%file,connect -o";

/// An attacker who has taken a server over can write any header to its image, and kill the server. Neither the next
/// server nor the opener opens a file that the VM's file does not name.
#[test]
fn a_rewritten_header_leads_to_nothing() {
    let mut host = Host::new();
    let mut service = host.service("one", USERS[0]);
    let image = host.images.path().join(format!("{}.qcow2", service.name));
    let at = |what: &str| text(&host.images.path().join(what)).to_owned();
    fs::write(at("secret.raw"), [0x5e; 1 << 20]).expect("writes");
    let device = at("secret.device");
    crate::run_tool("mknod", &[&device, "b", "7", "0"]);
    let socket = at("secret.sock");
    let _server = std::os::unix::net::UnixListener::bind(&socket).expect("listens");
    let mut guest = host.disk(&service.name, "vdb");
    assert_io_works(&mut guest, 1);
    drop(guest);
    let traces = host.folder.path().join("traces");
    fs::create_dir(&traces).expect("a folder");
    let opener = text(&traces.join("opener")).to_owned();
    let tracer = format!("exec {TRACE} \"$1\" -p {}", host.opener.id());
    let _tracer = Process::start(inside(host.init, &tracer, &[&opener])).expect("strace starts");

    let headers: [(&str, Vec<String>); 4] = [
        ("backing", ["-b", &at("secret.raw"), "-F", "raw"].map(str::to_owned).to_vec()),
        ("backing", ["-b", &device, "-F", "raw"].map(str::to_owned).to_vec()),
        ("backing", ["-b", &format!("nbd+unix:///?socket={socket}"), "-F", "raw"].map(str::to_owned).to_vec()),
        ("data-file", Vec::new()),
    ];
    for (number, (key, words)) in headers.into_iter().enumerate() {
        service.process.kill();
        let before = fs::read(&image).expect("is there");
        match key {
            "backing" => {
                let words = words.iter().map(String::as_str);
                let words: Vec<&str> = ["rebase", "-u", "-f", "qcow2"].into_iter().chain(words).collect();
                crate::run_tool("qemu-img", &[&words[..], &[text(&image)]].concat());
            }
            _ => {
                let options = format!("data_file={},data_file_raw=on", at("secret.data"));
                crate::run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&image), "8M"]);
            }
        }
        // A server that follows headers does open the file, which shows that the trace works.
        let trace = traces.join(format!("followed-{number}"));
        let tracer_beside = TRACE.replace("strace", "strace -D");
        let follow = format!("exec {tracer_beside} \"$1\" larder disk serve --socket /tmp/followed.sock \"$2\"");
        let follows = Process::start(inside(host.init, &follow, &[text(&trace), text(&image)])).expect("strace starts");
        wait_until(&format!("{key}: a server follows the header"), || {
            fs::read_to_string(&trace).is_ok_and(|trace| trace.contains("secret"))
        });
        drop(follows);

        let trace = text(&traces.join(format!("service-{number}"))).to_owned();
        let traced = SERVICE.replace("exec setpriv", &format!("exec {TRACE} \"$3\" setpriv"));
        let user = USERS[0].to_string();
        let (code, said) = run_command(inside(host.init, &traced, &[&service.name, &user, &trace]));
        assert!(code.is_some_and(|code| code != 0), "{key}: it serves: {said}");
        assert!(
            said.contains("secret") && said.contains(&format!("{key} = ")),
            "{key}: what would allow it is told: {said}"
        );
        let opened = fs::read_to_string(&trace).expect("it was traced");
        assert!(opened.contains("larder-open.sock"), "{opened}");
        let of_others: Vec<&str> = opened.lines().filter(|line| line.contains("secret")).collect();
        assert!(of_others.is_empty(), "{key}: {of_others:?}");

        fs::write(&image, before).expect("is ours");
        service.process = host.start(&service.name, USERS[0]);
        let mut guest = host.disk(&service.name, "vdb");
        assert_io_works(&mut guest, number as u64 + 2);
    }
    let opened = fs::read_to_string(&opener).expect("it was traced");
    assert!(opened.contains(text(&image)), "the opener is traced: {opened}");
    let of_others: Vec<&str> = opened.lines().filter(|line| line.contains("secret")).collect();
    assert!(of_others.is_empty(), "{of_others:?}");
    ends(service.process);
}

#[cfg(target_arch = "x86_64")]
mod taken_over {
    use super::*;
    use crate::attacker::{Argument, Victim, number, path};

    type Attack = (String, libc::c_long, Vec<Argument>);

    /// Returns attacks on files and processes of others. The files that these remove or change exist for that
    /// purpose.
    fn attacks(host: &Host, other: &Service, victims: &Path) -> Vec<Attack> {
        let id = other.process.id();
        let at = || number(libc::AT_FDCWD);
        let mut all: Vec<Attack> = Vec::new();
        let find = |folder: &str, what: &str| {
            let files = host.files(folder);
            files.into_iter().find(|it| it.contains(what)).unwrap_or_else(|| panic!("no {what}"))
        };
        let image = |what: &str| text(&host.images.path().join(format!("{}.{what}", other.name))).to_owned();
        let journal = find(&format!("/run/larder-vm/{}", other.name), ".journal");
        let note = find(&format!("/var/lib/larder-vm/{}", other.name), "/caches/");
        let own = [journal, note, image("raw"), image("qcow2"), image("cache")];
        let roots = [
            "/etc/shadow".to_owned(),
            format!("/etc/larder/vms/{}.toml", other.name),
            "/etc/larder/vms/new.toml".to_owned(),
        ];
        for file in own.iter().chain(&roots[..2]) {
            for (how, flags) in [("read", libc::O_RDONLY), ("write", libc::O_WRONLY)] {
                all.push((format!("{how} {file}"), libc::SYS_openat, vec![at(), path(file), number(flags)]));
            }
        }
        let made = libc::O_WRONLY | libc::O_CREAT;
        let folders = [
            format!("/run/larder-vm/{}", other.name),
            format!("/var/lib/larder-vm/{}", other.name),
            "/run/larder".to_owned(),
            "/run/larder-vm".to_owned(),
            "/var/lib/larder-vm".to_owned(),
            "/etc/larder/vms".to_owned(),
            "/tmp".to_owned(),
            "/root".to_owned(),
        ];
        for folder in &folders {
            let new = format!("{folder}/larder-test-{}", other.name);
            all.push((format!("list {folder}"), libc::SYS_openat, {
                vec![at(), path(folder), number(libc::O_RDONLY | libc::O_DIRECTORY)]
            }));
            all.push((format!("make {new}"), libc::SYS_openat, vec![at(), path(&new), number(made), number(0o600)]));
            let there = format!("{folder}/larder-there-{}", other.name);
            fs::write(host.path(&there), "here").expect("root may");
            all.push((format!("remove {there}"), libc::SYS_unlinkat, vec![at(), path(&there), number(0)]));
            all.push((
                format!("make folder {new}.d"),
                libc::SYS_mkdirat,
                vec![at(), path(&format!("{new}.d")), number(0o700)],
            ));
        }
        // Files in another user's directory; each is used once.
        let victim = |what: &str| text(&victims.join(what)).to_owned();
        all.push(("truncate".to_owned(), libc::SYS_openat, {
            vec![at(), path(&victim("truncated")), number(libc::O_WRONLY | libc::O_TRUNC)]
        }));
        all.push(("remove".to_owned(), libc::SYS_unlinkat, vec![at(), path(&victim("removed")), number(0)]));
        all.push(("rename".to_owned(), libc::SYS_renameat, {
            vec![at(), path(&victim("renamed")), at(), path(&victim("renamed-to"))]
        }));
        all.push(("touch".to_owned(), libc::SYS_utimensat, {
            vec![at(), path(&victim("touched")), number(0), number(0)]
        }));
        for (what, call, arguments) in [
            ("truncate by path", libc::SYS_truncate, vec![path(&victim("truncated")), number(0)]),
            ("give away", libc::SYS_fchownat, {
                vec![at(), path(&victim("touched")), number(0), number(0), number(0)]
            }),
            ("change rights", libc::SYS_fchmodat, vec![at(), path(&victim("touched")), number(0o777)]),
            ("link", libc::SYS_linkat, {
                vec![at(), path(&victim("linked")), at(), path(&victim("linked-to")), number(0)]
            }),
            ("symbolic link", libc::SYS_symlinkat, vec![path("/etc"), at(), path(&victim("symlinked"))]),
            ("FIFO", libc::SYS_mknodat, {
                vec![at(), path(&victim("fifo")), number((libc::S_IFIFO | 0o600) as i64), number(0)]
            }),
            ("watch", libc::SYS_inotify_init1, vec![number(0)]),
            ("signal", libc::SYS_kill, vec![number(id), number(0)]),
            ("signal a thread", libc::SYS_tgkill, vec![number(id), number(id), number(0)]),
            ("hold a process", libc::SYS_pidfd_open, vec![number(id), number(0)]),
            ("memory", libc::SYS_openat, { vec![at(), path(&format!("/proc/{id}/mem")), number(libc::O_RDWR)] }),
            ("open files", libc::SYS_openat, {
                vec![at(), path(&format!("/proc/{id}/fd")), number(libc::O_RDONLY | libc::O_DIRECTORY)]
            }),
            ("connect", libc::SYS_socket, vec![number(libc::AF_UNIX), number(libc::SOCK_STREAM), number(0)]),
            ("messages", libc::SYS_socket, vec![number(libc::AF_UNIX), number(libc::SOCK_SEQPACKET), number(0)]),
            ("datagrams", libc::SYS_socket, vec![number(libc::AF_UNIX), number(libc::SOCK_DGRAM), number(0)]),
            ("network", libc::SYS_socket, vec![number(libc::AF_INET), number(libc::SOCK_STREAM), number(0)]),
            ("netlink", libc::SYS_socket, vec![number(libc::AF_NETLINK), number(libc::SOCK_RAW), number(0)]),
            ("namespace", libc::SYS_unshare, vec![number(0)]),
            ("user", libc::SYS_setresuid, vec![number(-1), number(-1), number(-1)]),
            ("ring", libc::SYS_io_uring_setup, vec![number(1), Argument::Bytes(vec![0; 120])]),
            ("kernel's log", libc::SYS_syslog, vec![number(10), number(0), number(0)]),
        ] {
            all.push((what.to_owned(), call, arguments));
        }
        all
    }

    /// Ends the load on drop, also when the test fails.
    struct Over<'a>(&'a AtomicBool);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Creates files of another user.
    fn victims(host: &Host, user: u32) -> PathBuf {
        let folder = host.folder.path().join("victims");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).expect("a folder");
        for name in ["truncated", "removed", "renamed", "touched", "linked"] {
            fs::write(folder.join(name), "here").expect("a file");
            chown(folder.join(name), Some(user), Some(user)).expect("root may");
        }
        chown(&folder, Some(user), Some(user)).expect("root may");
        folder
    }

    /// An attacker who has taken a service over reaches no file, process or socket of others.
    #[test]
    fn service_reaches_nothing_of_others() {
        let mut host = Host::new();
        let one = host.service("one", USERS[0]);
        let two = host.service("two", USERS[1]);
        let folder = victims(&host, ALICE);
        let all = attacks(&host, &two, &folder);
        assert!(all.len() >= 60, "{}", all.len());

        let is_over = AtomicBool::new(false);
        let (allowed, failed) = std::thread::scope(|scope| {
            // The other service works concurrently, and its data is right.
            let loads = ["vda", "vdb"].map(|disk| {
                let mut guest = host.disk(&two.name, disk);
                let is_over = &is_over;
                scope.spawn(move || {
                    let mut rounds = 0;
                    while !is_over.load(Ordering::Relaxed) || rounds < 10 {
                        rounds += 1;
                        assert_io_works(&mut guest, rounds);
                    }
                })
            });
            let over = Over(&is_over);
            let answers = |process: u32| -> Vec<(&str, Option<i64>)> {
                let victim = Victim::new(process);
                let answer = |(_, call, arguments): &Attack| victim.call(process as i32, *call, arguments);
                all.iter().map(|attack| (attack.0.as_str(), answer(attack))).collect()
            };
            let refused = [-libc::EPERM, -libc::EACCES].map(|error| Some(i64::from(error)));
            let mut allowed = answers(one.process.id());
            allowed.retain(|(_, answer)| !refused.contains(answer));
            for name in ["truncated", "removed", "renamed", "touched", "linked"] {
                assert_eq!(fs::read(folder.join(name)).expect("is there"), b"here", "{name}");
            }
            // The same attacks succeed with root's rights; otherwise their failure would show nothing.
            let free = Process::start(inside(host.init, "exec sleep 1000", &[])).expect("starts");
            let waits_in = PathBuf::from(format!("/proc/{}/wchan", free.id()));
            while !fs::read_to_string(&waits_in).expect("it runs").contains("nanosleep") {
                std::thread::sleep(Duration::from_millis(5));
            }
            let mut failed = answers(free.id());
            failed.retain(|(_, answer)| answer.is_none_or(|answer| answer < 0));
            drop(over);
            for load in loads {
                load.join().expect("all that it has read is right");
            }
            (allowed, failed)
        });
        assert!(allowed.is_empty(), "{allowed:?}");
        assert!(failed.is_empty(), "{failed:?}");
        let mut guest = host.disk(&one.name, "vda");
        assert_io_works(&mut guest, 1);
        drop(guest);
        ends(one.process);
        ends(two.process);
    }
}

//! A host with its own libvirtd: `/etc`, `/run` and `/var` are the test's, and its processes are in a PID namespace
//! that ends with it. A libvirtd of the machine is not touched.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use larder_bench::campaign::guest::{LIMIT as GUEST_LIMIT, project};
use larder_bench::campaign::process::{Process, killed_with_parent};
use tempfile::TempDir;

use crate::support::{TEST_TIMEOUT, larder_path, require_root, run_command, temp_dir_on_tmpfs};

/// Script that sets the namespaces up before anything is started. `$1` is the test's directory.
///
/// The host gets its own name and UUID, since libvirt refuses to move a domain from a host to the same host.
///
/// KVM is hidden: where it exists but does not work, libvirtd probes QEMU's capabilities anew for each command. The
/// shell keeps running as the init process, which reaps orphaned processes.
const SET_UP: &str = r#"
set -e
mkdir "$1/etc"
cp -a /etc/. "$1/etc"
mount --bind "$1/etc" /etc
for folder in /run /var/lib /var/log /var/cache; do mount -t tmpfs -o mode=755 tmpfs $folder; done
mkdir -p /run/lock /etc/libvirt/hooks/qemu.d /var/log/libvirt /var/lib/libvirt /var/cache/libvirt
echo 'stdio_handler = "file"
cgroup_controllers = []
namespaces = []' >/etc/libvirt/qemu.conf
number=$(cat /proc/sys/kernel/random/uuid)
hostname "host-$number"
echo 'auth_unix_rw = "none"
host_uuid = "'$number'"' >/etc/libvirt/libvirtd.conf
rm -rf /etc/libvirt/qemu/networks /etc/libvirt/qemu/autostart /etc/larder
cp "$2/packaging/libvirt/larder" /etc/libvirt/hooks/qemu.d/larder
touch "$1/no-kvm"
chmod 0 "$1/no-kvm"
[ ! -e /dev/kvm ] || mount --bind "$1/no-kvm" /dev/kvm
[ ! -d "$3" ] || cp -a "$3/." /var/cache/libvirt
echo SET-UP
while :; do sleep 1; done
"#;

/// The host; it ends on drop.
pub(crate) struct Host {
    process: Process,
    /// PID of its init process, in the outer namespace.
    init: u32,
    /// Directory of all the test's files; QEMU's users may read it.
    pub(crate) folder: TempDir,
}

impl Host {
    /// Starts a host without libvirtd.
    pub(crate) fn new() -> Self {
        require_root("for namespaces");
        let folder = temp_dir_on_tmpfs();
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(folder.path(), open).expect("a folder for QEMU's user");
        fs::create_dir(folder.path().join("bin")).expect("a folder");
        symlink(larder_path(), folder.path().join("bin/larder")).expect("a link");
        let mut command = killed_with_parent("unshare");
        command
            .args(["--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc", "--kill-child"])
            .args(["--net", "--ipc", "--uts", "sh", "-c", SET_UP, "sh"])
            .args([folder.path(), &project().canonicalize().expect("the project"), &cached()]);
        let process = Process::start(command).expect("namespaces");
        process.wait_for("SET-UP", TEST_TIMEOUT).expect("is set up");
        let init = child_of(process.id()).expect("a process in the namespaces");
        Self { process, init, folder }
    }

    /// Starts a host with libvirtd.
    pub(crate) fn with_libvirtd() -> Self {
        let host = Self::new();
        host.start_libvirtd();
        host
    }

    pub(crate) fn start_libvirtd(&self) {
        let script = "exec libvirtd --daemon --pid-file /run/libvirtd.pid";
        let (code, said) = self.run(&["sh", "-c", script]);
        assert_eq!(code, Some(0), "{said}; testbed/setup.sh installs what the tests need");
        // libvirtd answers once it has probed QEMU's capabilities.
        self.virsh(&["list"]);
    }

    /// Stops libvirtd, by SIGKILL after a minute: on a busy machine Debian 13's libvirtd may wait for its own threads
    /// forever.
    pub(crate) fn stop_libvirtd(&self) {
        const STOP: &str = "pid=$(cat /run/libvirtd.pid); kill $pid; \
            for _ in $(seq 600); do [ -e /run/libvirtd.pid ] && kill -0 $pid || break; sleep 0.1; done; \
            [ -e /run/libvirtd.pid ] || exit 0; \
            kill -9 $pid; for _ in $(seq 100); do kill -0 $pid || break; sleep 0.1; done; rm -f /run/libvirtd.pid";
        // libvirtd may have exited by itself at any point of the script.
        self.works(&["sh", "-c", STOP]);
    }

    /// Returns a command that runs in the host.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        self.enter(&["--net"], words)
    }

    /// Returns a command that runs in the host, but on the machine's network, where hosts reach each other.
    pub(crate) fn command_on_network(&self, words: &[&str]) -> Command {
        self.enter(&[], words)
    }

    fn enter(&self, more: &[&str], words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.init.to_string()])
            .args(["--mount", "--pid", "--ipc", "--uts", "--wd=/"])
            .args(more);
        let folder = self.folder.path().join("bin");
        let path = format!("{}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", folder.display());
        command.args(["env", "-u", "STATE_DIRECTORY"]).arg(format!("PATH={path}"));
        command.arg("LC_ALL=C").args(words);
        command
    }

    pub(crate) fn run(&self, words: &[&str]) -> (Option<i32>, String) {
        run_command(self.command(words))
    }

    /// Runs a command that must succeed, and returns its output.
    pub(crate) fn works(&self, words: &[&str]) -> String {
        let (code, said) = self.run(words);
        assert_eq!(code, Some(0), "{words:?}: {said}");
        said
    }

    /// Runs a command that must fail with all these words in its output.
    pub(crate) fn refused(&self, words: &[&str], with: &[&str]) -> String {
        let (code, said) = self.run(words);
        assert!(code.is_some_and(|code| code != 0), "{words:?}: {said}");
        for word in with {
            assert!(said.contains(word), "{words:?}: nothing of {word}: {said}");
        }
        said
    }

    pub(crate) fn virsh(&self, arguments: &[&str]) -> String {
        self.works(&[&["virsh", "--quiet", "--connect", "qemu:///system"], arguments].concat())
    }

    pub(crate) fn larder(&self, arguments: &[&str]) -> String {
        self.works(&[&["larder"], arguments].concat())
    }

    /// Returns the XML of a domain for its next start.
    pub(crate) fn xml(&self, domain: &str) -> String {
        self.virsh(&["dumpxml", "--inactive", "--security-info", domain])
    }

    /// Defines a domain.
    pub(crate) fn define(&self, xml: &str) {
        let path = self.folder.path().join("define.xml");
        fs::write(&path, xml).expect("writes");
        self.virsh(&["define", path.to_str().expect("UTF-8")]);
    }

    /// Returns the outside path of a path in the host.
    pub(crate) fn inside(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Waits until a condition holds.
    pub(crate) fn wait_until(&self, what: &str, happened: impl Fn() -> bool) {
        let begin = Instant::now();
        while !happened() {
            assert!(begin.elapsed() < GUEST_LIMIT, "not within {GUEST_LIMIT:?}: {what}; {}", self.process.output());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Directory with libvirtd's cache of QEMU's capabilities, which are slow to probe. The next libvirtd verifies the
/// cache.
fn cached() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("libvirt-cache")
}

impl Drop for Host {
    fn drop(&mut self) {
        let (from, to) = (self.inside("/var/cache/libvirt"), cached());
        if from.join("qemu/capabilities").exists() && !to.exists() {
            let beside = to.with_extension(std::process::id().to_string());
            let copied = Command::new("cp").arg("-a").args([&from, &beside]).status();
            // Another test may have moved its copy there first.
            if !copied.is_ok_and(|status| status.success()) || fs::rename(&beside, &to).is_err() {
                let _ = fs::remove_dir_all(&beside);
            }
        }
    }
}

fn child_of(parent: u32) -> Option<u32> {
    // setpriv has executed unshare in the same process, whose only child is the init process of the namespaces.
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// Copies a file so that QEMU's user can read it.
pub(crate) fn copy_for_qemu(from: &Path, to: &Path) {
    fs::copy(from, to).expect("copies");
    fs::set_permissions(to, fs::Permissions::from_mode(0o644)).expect("ours");
}

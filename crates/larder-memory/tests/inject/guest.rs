//! A QEMU that runs a guest: the test bed's kernel and initramfs, with a script of the test.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::process::Pid;

/// Work of the guest: it copies and compares files, and reports each round.
const SCRIPT: &str = "\
set -e
for round in $(seq 1 ROUNDS); do
  dd if=/dev/urandom of=/dev/shm/one bs=64k count=16 2>/dev/null
  cp /dev/shm/one /dev/shm/other
  cmp /dev/shm/one /dev/shm/other
  echo ROUND $round
done
";

/// A running QEMU. It is killed when this is dropped.
pub(crate) struct Guest {
    qemu: Child,
    rounds: Arc<AtomicU32>,
    console: Arc<Mutex<String>>,
    _folder: tempfile::TempDir,
}

impl Guest {
    /// Boots a guest that ends after `rounds` rounds.
    pub(crate) fn start(rounds: u32, arguments: &[&str]) -> Self {
        Self::boot(&SCRIPT.replace("ROUNDS", &rounds.to_string()), &[], arguments)
    }

    /// Boots a guest that contains these files, at the same paths, and that runs the script.
    fn boot(text: &str, files: &[PathBuf], arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (script, initrd) = (folder.path().join("test.sh"), folder.path().join("initrd"));
        fs::write(&script, text).unwrap();
        let made = Command::new(project().join("testbed/with-script.sh"))
            .args([&test_bed("guest.cpio.gz"), &script, &initrd])
            .status()
            .unwrap();
        assert!(made.success(), "testbed/with-script.sh");
        append(&initrd, files, &folder.path().join("files"));
        let mut qemu = Command::new("setpriv")
            .args("--pdeathsig KILL -- qemu-system-x86_64 -accel tcg,thread=multi -smp 2 -nodefaults".split(' '))
            .args("-display none -no-reboot -serial stdio -machine q35,memory-backend=m".split(' '))
            .args("-object memory-backend-memfd,id=m,size=512M,share=on -m 512M".split(' '))
            .arg("-kernel")
            .arg(test_bed("vmlinuz"))
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", "console=ttyS0 quiet panic=-1 no_timer_check"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(qemu.stdout.take().unwrap());
        let guest = Self { qemu, rounds: Arc::default(), console: Arc::default(), _folder: folder };
        let (rounds, console) = (Arc::clone(&guest.rounds), Arc::clone(&guest.console));
        thread::spawn(move || {
            for line in output.split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line);
                if line.starts_with("ROUND") {
                    rounds.fetch_add(1, Ordering::SeqCst);
                }
                let mut console = console.lock().unwrap();
                console.push_str(&line);
                console.push('\n');
            }
        });
        // Until it has become QEMU, the process has no guest memory.
        while !fs::read_link(format!("/proc/{}/exe", guest.qemu.id()))
            .is_ok_and(|exe| exe.ends_with("qemu-system-x86_64"))
        {
            super::pause();
        }
        guest
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.qemu)
    }

    /// Returns the number of finished rounds.
    pub(crate) fn rounds(&self) -> u32 {
        self.rounds.load(Ordering::SeqCst)
    }

    /// Returns true if QEMU has ended.
    pub(crate) fn has_ended(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.qemu.id())).unwrap();
        status.contains("State:\tZ")
    }

    /// Waits until QEMU ends, and checks that it and the guest were successful.
    pub(crate) fn finish(mut self) {
        while !self.has_ended() {
            super::pause();
        }
        let ended = self.qemu.wait().unwrap();
        let console = self.console.lock().unwrap();
        assert!(ended.success() && console.contains("LARDER-GUEST-EXIT 0"), "QEMU: {ended:?}, guest:\n{console}");
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Runs a single test of this program in a guest.
pub(crate) fn run_in_guest(test: &str, before: &str, arguments: &[&str]) {
    let program = std::env::current_exe().unwrap();
    let libraries = Command::new("ldd").arg(&program).output().unwrap();
    let libraries = String::from_utf8(libraries.stdout).unwrap();
    let paths = libraries.split_whitespace().filter(|word| word.starts_with('/'));
    let files: Vec<PathBuf> = paths.map(PathBuf::from).chain([program.clone()]).collect();
    let script = format!("set -e\n{before}\n{} --ignored --exact {test} --nocapture\n", program.display());
    Guest::boot(&script, &files, arguments).finish();
}

/// Appends these files to an initramfs, stripped.
fn append(initrd: &Path, files: &[PathBuf], folder: &Path) {
    for file in files {
        let copy = folder.join(file.strip_prefix("/").unwrap());
        fs::create_dir_all(copy.parent().unwrap()).unwrap();
        let stripped = Command::new("strip").arg("-o").arg(&copy).arg(file).status().unwrap();
        assert!(stripped.success(), "strip {}", file.display());
    }
    if !files.is_empty() {
        let append = "cd \"$1\" && find . -mindepth 1 | cpio --quiet -o -H newc >>\"$2\"";
        let appended = Command::new("sh").args(["-c", append, "sh"]).args([folder, initrd]).status();
        assert!(appended.unwrap().success(), "cpio");
    }
}

fn project() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn test_bed(file: &str) -> PathBuf {
    let path = project().join("target/testbed").join(file);
    assert!(path.exists(), "{} is missing: run testbed/setup.sh", path.display());
    path
}

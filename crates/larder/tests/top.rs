//! `larder top` in a terminal, which is tmux.

mod support;

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::process::Process;
use support::{TEST_TIMEOUT, larder_path, run_command, temp_dir_on_tmpfs};

/// A terminal in which a command runs.
struct Terminal(String);

impl Terminal {
    fn start(command: &str) -> Self {
        let terminal = Self(format!("larder-top-{}", std::process::id()));
        terminal.tmux(&["new-session", "-d", "-x", "140", "-y", "30", command]);
        terminal
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let mut tmux = Command::new("tmux");
        tmux.env("LC_ALL", "C.UTF-8").args(["-L", &self.0]).args(arguments);
        run_command(tmux).1
    }

    fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    /// Waits until the screen contains all of `parts`, and returns its text.
    fn shows(&self, parts: &[&str]) -> String {
        let give_up = Instant::now() + TEST_TIMEOUT;
        loop {
            let screen = self.tmux(&["capture-pane", "-p"]);
            if parts.iter().all(|part| screen.contains(part)) {
                return screen;
            }
            assert!(Instant::now() < give_up, "no {parts:?} in\n{screen}");
            std::thread::yield_now();
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

#[test]
fn keys_select_vms_and_disks() {
    let folder = temp_dir_on_tmpfs();
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let image = std::fs::File::create(folder.path().join("disk.raw"));
    image.and_then(|image| image.set_len(8 << 20)).expect("an image");
    // A unique name, since this host may serve other VMs.
    let name = format!("top-test-{}", std::process::id());
    let file = folder.path().join(format!("{name}.toml"));
    let disks = "control = \"control\"\n[[disk]]\nimage = \"disk.raw\"\nformat = \"raw\"\nsocket = \"vda\"\niops-total = 123456\n";
    std::fs::write(&file, disks).expect("writes the file");
    let mut command = Command::new(larder_path());
    command.arg("vm").arg(&file);
    let server = Process::start(command).expect("larder starts");
    server.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");

    let terminal = Terminal::start(&format!("{} top; cat", text(larder_path())));
    // The name may be truncated.
    terminal.shows(&["larder top: ", "top-test-", "vm ", "aqu-sz"]);
    terminal.press("h");
    terminal.shows(&["all disks   3 the selected disk"]);
    terminal.press("h");
    terminal.press("2");
    terminal.shows(&["all disks", "vda"]);
    terminal.press("s");
    terminal.shows(&["sort (requests)"]);
    terminal.press("s");
    terminal.press("s");
    terminal.press("s");
    terminal.press("s");
    terminal.shows(&["sort (name)"]);
    terminal.press("1");
    // Selects the VM, whatever its row is.
    let screen = terminal.shows(&["top-test-"]);
    let rows = screen.lines().skip(2);
    let place = rows.take_while(|row| !row.starts_with("top-test-")).count();
    (0..place).for_each(|_| terminal.press("Down"));
    terminal.press("Enter");
    terminal.shows(&[&name, "vda"]);
    terminal.press("Enter");
    terminal.shows(&[&format!("{name} vda"), "image    ", "limits   iops-total=123456", "disk.raw, raw, 8 MiB"]);
    terminal.press("Escape");
    terminal.shows(&["%util"]);
    terminal.press("q");
    // The terminal is restored.
    let give_up = Instant::now() + TEST_TIMEOUT;
    while terminal.shows(&[]).contains("aqu-sz") {
        assert!(Instant::now() < give_up, "it does not end");
    }

    let mut batch = Command::new(larder_path());
    batch.args(["top", "--batch", "-n", "2", "-d", "0.1"]);
    let (code, said) = run_command(batch);
    assert!(code == Some(0) && said.matches(&name).count() == 2, "{said}");
    let mut nowhere = Command::new(larder_path());
    nowhere.arg("top");
    let (code, said) = run_command(nowhere);
    assert!(code == Some(2) && said.contains("not a terminal"), "{said}");
}

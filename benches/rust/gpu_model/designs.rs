//! Comparison of designs, which are switches of experiments: a design is as good as in its worst set of parameters.

use std::process::Command;

/// Sets in which designs are compared.
pub const SETS: [&str; 6] = ["stream", "event", "copy", "reads", "malloc", "pages"];

/// Designs, each with its switches and the arguments of this program.
const DESIGNS: [(&str, &str, &[&str]); 15] = [
    ("as shipped", "", &[]),
    ("first chunks of 0.5, 1, 2 MiB", "first_chunk_kib=512", &[]),
    ("first chunk of 1, 2 MiB", "first_chunk_kib=1024", &[]),
    ("windows of 64, 128, ... MiB", "window_mib=64", &[]),
    ("windows of 256, 512, ... MiB", "window_mib=256", &[]),
    ("ramp and windows of 64 MiB", "first_chunk_kib=512,window_mib=64", &[]),
    ("16 workers a slot", "workers_per_slot=16", &[]),
    ("four copies ahead", "copies_ahead=4", &[]),
    ("slots of 2 MiB", "", &["chunk_mib=2"]),
    ("slots pinned before", "", &["prepared"]),
    ("one slot pinned ahead", "pin_ahead=1", &[]),
    ("two slots pinned ahead", "pin_ahead=2", &[]),
    ("workers pin all slots", "pin_ahead=0", &[]),
    ("one ahead, windows of 256 MiB", "pin_ahead=1,window_mib=256", &[]),
    ("readers near the GPU", "reader_node=1", &["near_us=5"]),
];

/// Milliseconds of a first and of a second load.
type Times = [f64; 2];

/// Runs a load by each design in each set, and prints the times, and the worst gain of each design.
pub fn compare(load: &str, sets: &[String], arguments: &[String], link_ms: f64) {
    let times: Vec<Vec<Times>> =
        DESIGNS.iter().map(|design| sets.iter().map(|set| run(load, set, design, arguments)).collect()).collect();
    for (turn, name) in ["first", "second"].iter().enumerate() {
        println!("\n{load}, {name} load, ms, by set: {}; share of the link; worst gain, ms", sets.join(", "));
        let mut rows: Vec<(f64, String)> = DESIGNS
            .iter()
            .zip(&times)
            .map(|((design, ..), of_design)| {
                let ms: Vec<f64> = of_design.iter().map(|times| times[turn]).collect();
                let gains = times[0].iter().zip(&ms).map(|(base, ms)| base[turn] - ms);
                let worst = gains.fold(f64::MAX, f64::min);
                let (least, most) =
                    (ms.iter().copied().fold(f64::MAX, f64::min), ms.iter().copied().fold(0.0, f64::max));
                let share = format!("{:3.0} .. {:3.0}%", 100.0 * link_ms / most, 100.0 * link_ms / least);
                let ms: String = ms.iter().map(|ms| format!("{ms:7.1}")).collect();
                (worst, format!("{design:30} {ms}  {share}  {worst:+6.1}"))
            })
            .collect();
        rows.sort_by(|one, other| other.0.total_cmp(&one.0));
        rows.iter().for_each(|(_, row)| println!("{row}"));
    }
}

/// Returns the medians of a load in a process of its own, since a process reads switches once.
fn run(load: &str, set: &str, (_, switches, changes): &(&str, &str, &[&str]), arguments: &[String]) -> Times {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(arguments).args(*changes).args([load, "plain", &format!("set={set}")]);
    let output = command.env("FST_EXPERIMENTS", switches).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{set}: {}", String::from_utf8_lossy(&output.stderr));
    let times: Vec<Vec<f64>> =
        text.lines().map(|line| line.split_whitespace().map(|ms| ms.parse().unwrap()).collect()).collect();
    [0, 1].map(|turn| {
        let mut of_turn: Vec<f64> = times.iter().map(|round| round[turn]).collect();
        of_turn.sort_by(f64::total_cmp);
        of_turn[of_turn.len() / 2]
    })
}

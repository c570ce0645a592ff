//! `gantry top`: the map of the cluster in the terminal, live. Watches GpuNodes and Gangs; writes nothing.

use std::ops::ControlFlow;
use std::thread;
use std::time::Duration;

use ansi_to_tui::IntoText as _;
use anyhow::Context as _;
use clap::Args;
use gantry_map::{ClusterMap, Letters, Page};
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::Stylize as _;
use ratatui::text::{Line, Text};
use ratatui::widgets::Paragraph;
use ratatui::{Frame, Terminal};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::live_map::LiveMap;
use crate::map::{self, Origin, Selection};
use crate::runtime::{BadInput, print};
use crate::screen::Screen;
use crate::visible::Visible;

/// Options of `gantry top`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Keys:
  arrows (k, j), page up, page down, home, end   scroll
  f                     only nodes with free GPUs, or all again
  /                     filter by a part of the name; enter keeps it, escape
                        removes it
  q, escape, control-c  end

Examples:
  gantry top                            every node; alike nodes are one line
  gantry top --gang research/train      only the nodes of a gang
  gantry top --once                     one picture as text, without keys

Exit codes: 0 ended, 1 the cluster cannot be read, 2 no terminal, or with --once
no such node or gang.")]
pub(crate) struct TopArgs {
    #[command(flatten)]
    origin: Origin,

    #[command(flatten)]
    selection: Selection,

    /// Print one picture as text and end, for scripts and tests
    #[arg(long)]
    once: bool,
}

/// Shortest time between two pictures of a cluster that changes.
const PERIOD: Duration = Duration::from_millis(500);
/// Keys that wait to be handled.
const KEYS: usize = 16;
/// Columns and lines where the terminal has none.
const SIZE: (u16, u16) = (100, 40);
/// Longest filter.
const FILTER: usize = 63;

/// Runs `gantry top` until a key ends it, or `shutdown`.
///
/// # Errors
/// The cluster cannot be read, or standard output is no terminal.
pub(crate) async fn run(args: TopArgs, shutdown: CancellationToken) -> anyhow::Result<()> {
    let size = terminal_size::terminal_size().map_or(SIZE, |(width, height)| (width.0, height.0));
    let Screen { columns, color } = Screen::of_stdout(size.0.into());
    if !args.once && !std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        let wrong = anyhow::anyhow!("standard output is no terminal: use --once, or gantry map");
        return Err(BadInput(wrong).into());
    }
    let Some(connected) = shutdown.run_until_cancelled(args.origin.connect()).await else {
        return if args.once { Err(anyhow::anyhow!("interrupted")) } else { Ok(()) };
    };
    let (client, fabric) = connected?;
    let mut top = TopView::new(args.selection, color);
    if args.once {
        let map = map::read(client, &fabric).await?;
        top.set(top.selection.of(map)?);
        let columns = u16::try_from(columns).unwrap_or(size.0);
        return print(&Visible::new(&picture(&mut top, (columns, size.1))?));
    }
    let mut live = LiveMap::watch(client, fabric);
    let mut keys = keys();
    let mut terminal = ratatui::try_init().context("the terminal cannot be set up")?;
    let shown = show(&mut top, &mut live, &mut keys, &mut terminal, &shutdown).await;
    ratatui::restore();
    shown
}

async fn show(
    top: &mut TopView,
    live: &mut LiveMap,
    keys: &mut mpsc::Receiver<Event>,
    terminal: &mut ratatui::DefaultTerminal,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let mut due = Instant::now();
    loop {
        terminal.draw(|frame| top.draw(frame)).context("writing to the terminal")?;
        let changed = async {
            tokio::time::sleep_until(due).await;
            live.changed().await;
        };
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            key = keys.recv() => match key {
                Some(Event::Key(key)) if top.press(key).is_break() => return Ok(()),
                // Another size is drawn as it is.
                Some(_) => {}
                None => return Ok(()),
            },
            () = changed => {
                due = Instant::now() + PERIOD;
                top.trouble = live.trouble();
                if let Some(map) = live.map() {
                    top.set(map);
                }
            }
        }
    }
}

/// One picture as text.
fn picture(top: &mut TopView, (columns, lines): (u16, u16)) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(columns.min(400), lines.min(400)))?;
    terminal.draw(|frame| top.draw(frame))?;
    Ok(lines_of(terminal.backend().buffer()))
}

fn lines_of(buffer: &Buffer) -> String {
    let mut text = String::new();
    for line in buffer.content().chunks(usize::from(buffer.area.width).max(1)) {
        let line: String = line.iter().map(|cell| cell.symbol()).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// The keys of the terminal, and changes of its size. The thread ends with the process.
fn keys() -> mpsc::Receiver<Event> {
    let (send, keys) = mpsc::channel(KEYS);
    thread::spawn(move || {
        while let Ok(event) = event::read() {
            if send.blocking_send(event).is_err() {
                return;
            }
        }
    });
    keys
}

/// The state of the picture.
struct TopView {
    selection: Selection,
    color: bool,
    map: Option<ClusterMap>,
    letters: Letters,
    /// A part of the names of the nodes that are shown, in lower case.
    filter: String,
    /// The filter is being typed.
    is_typing: bool,
    /// The lines of the map for a width, until something changes.
    lines: Option<(usize, Text<'static>)>,
    /// The first line that is shown.
    from: usize,
    /// Lines of the window at the last picture.
    window: usize,
    /// What cannot be read.
    trouble: Option<String>,
}

impl TopView {
    fn new(selection: Selection, color: bool) -> Self {
        Self {
            selection,
            color,
            map: None,
            letters: Letters::default(),
            filter: String::new(),
            is_typing: false,
            lines: None,
            from: 0,
            window: 0,
            trouble: None,
        }
    }

    /// Shows another state of the cluster. Holders keep their letters.
    fn set(&mut self, map: ClusterMap) {
        self.letters.learn(&map);
        self.map = Some(map);
        self.lines = None;
    }

    /// Handles a key.
    fn press(&mut self, key: KeyEvent) -> ControlFlow<()> {
        if key.kind == KeyEventKind::Release {
            return ControlFlow::Continue(());
        }
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return ControlFlow::Break(());
        }
        if self.is_typing && self.edit_filter(key.code) {
            self.lines = None;
            self.from = 0;
            return ControlFlow::Continue(());
        }
        let page = self.window.saturating_sub(1).max(1);
        self.from = match key.code {
            KeyCode::Esc if !self.filter.is_empty() => {
                self.filter.clear();
                self.lines = None;
                0
            }
            KeyCode::Char('q') | KeyCode::Esc => return ControlFlow::Break(()),
            KeyCode::Char('/') => {
                self.is_typing = true;
                self.from
            }
            KeyCode::Char('f') => {
                self.selection.free = !self.selection.free;
                self.lines = None;
                0
            }
            KeyCode::Up | KeyCode::Char('k') => self.from.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.from.saturating_add(1),
            KeyCode::PageUp => self.from.saturating_sub(page),
            KeyCode::PageDown | KeyCode::Char(' ') => self.from.saturating_add(page),
            KeyCode::Home => 0,
            KeyCode::End => usize::MAX,
            _ => self.from,
        };
        ControlFlow::Continue(())
    }

    /// Whether a key belongs to the filter that is being typed.
    fn edit_filter(&mut self, key: KeyCode) -> bool {
        match key {
            KeyCode::Char(letter) if self.filter.chars().count() < FILTER => {
                self.filter.extend(letter.to_lowercase());
            }
            KeyCode::Char(_) => {}
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            _ => return false,
        }
        true
    }

    /// The map as lines of a width.
    fn text(&self, columns: usize) -> Text<'static> {
        let Some(map) = &self.map else {
            return Text::raw("GpuNodes and Gangs are being listed.");
        };
        let mut map = match self.selection.of(map.clone()) {
            Ok(map) => map,
            Err(error) => return Text::raw(Visible::new(&error.to_string()).to_string()),
        };
        map.nodes.retain(|node| node.name.to_lowercase().contains(&self.filter));
        let page = Page { columns, color: self.color, wide: !self.filter.is_empty() };
        let text = gantry_map::text(&map, &self.letters, page);
        let text = if self.color { Visible::colored(&text) } else { Visible::new(&text) };
        // Codes of colors only, which can be read.
        text.as_bytes().into_text().unwrap_or_default()
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)])
                .areas(frame.area());
        let columns = usize::from(body.width);
        let text = match self.lines.take() {
            Some((width, text)) if width == columns => text,
            _ => self.text(columns),
        };
        self.window = body.height.into();
        // A resized window may show the end already.
        self.from = self.from.min(text.lines.len().saturating_sub(self.window));
        let totals = self.map.as_ref().map_or_else(String::new, gantry_map::totals);
        frame.render_widget(Line::from(format!("gantry top  {totals}")).bold(), head);
        let shown: Vec<Line<'_>> = text.lines.iter().skip(self.from).take(self.window).cloned().collect();
        frame.render_widget(Paragraph::new(shown), body);
        frame.render_widget(Line::from(self.foot(text.lines.len())).dim(), foot);
        self.lines = Some((columns, text));
    }

    /// The last line of the window.
    fn foot(&self, all: usize) -> String {
        if let Some(trouble) = &self.trouble {
            return Visible::new(&format!("not current: {trouble}")).replace('\n', " ");
        }
        let filter = Visible::new(&self.filter);
        if self.is_typing {
            return format!("node name contains: {}_", &*filter);
        }
        let until = (self.from + self.window).min(all);
        let free = if self.selection.free { "f all nodes" } else { "f only free" };
        let filter =
            if filter.is_empty() { "/ filter".to_owned() } else { format!("escape removes /{}", &*filter) };
        format!(
            "q quit  arrows scroll  {free}  {filter}  lines {}-{until} of {all}",
            (self.from + 1).min(all)
        )
    }
}

#[cfg(test)]
mod tests {
    use gantry_api::GpuNode;

    use super::*;

    const DGX1: &str = include_str!("../../simulator/machines/dgx1-v100.yaml");

    fn cluster(nodes: usize, pod: &str) -> ClusterMap {
        let machine: gantry_topology::Machine = serde_saphyr::from_str(DGX1).unwrap();
        let uuids: Vec<_> = machine.gpus().iter().filter_map(|gpu| gpu.uuid.clone()).collect();
        let nodes: Vec<GpuNode> = (0..nodes)
            .map(|number| {
                // Each has a pod of its own on another GPU, so that no two are alike.
                let holders: Vec<_> = (0..8)
                    .filter(|gpu| number >> gpu & 1 == 1)
                    .map(|gpu| {
                        serde_json::json!({"namespace": "ml", "pod": format!("{pod}-{number}"), "resource": "nvidia.com/gpu",
                            "devices": [uuids[gpu]], "provenance": "PodResources"})
                    })
                    .collect();
                serde_json::from_value(serde_json::json!({
                    "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": format!("n{number:02}")},
                    "spec": {"machine": machine}, "status": {"holders": holders},
                }))
                .unwrap()
            })
            .collect();
        ClusterMap::of(&nodes, &[], |_| String::new())
    }

    fn top(map: ClusterMap, color: bool) -> TopView {
        let selection = Selection { node: None, gang: None, free: false };
        let mut top = TopView::new(selection, color);
        top.set(map);
        top
    }

    fn press(top: &mut TopView, code: KeyCode) -> bool {
        top.press(KeyEvent::new(code, KeyModifiers::NONE)).is_break()
    }

    fn lines(top: &TopView) -> usize {
        top.lines.as_ref().map_or(0, |(_, text)| text.lines.len())
    }

    #[test]
    fn picture_has_totals_map_and_keys() {
        let text = picture(&mut top(cluster(3, "train"), false), (90, 12)).unwrap();
        insta::assert_snapshot!(text);
        assert_eq!(
            text,
            picture(&mut top(cluster(3, "train"), true), (90, 12)).unwrap(),
            "colors are no text"
        );
    }

    #[test]
    fn keys_scroll_within_the_map() {
        let mut top = top(cluster(60, "train"), false);
        let first =
            |top: &mut TopView| picture(top, (80, 20)).unwrap().lines().nth(1).unwrap().trim().to_owned();
        assert!(first(&mut top).starts_with("n00"));
        press(&mut top, KeyCode::Up);
        assert!(first(&mut top).starts_with("n00"));
        press(&mut top, KeyCode::Down);
        assert!(!first(&mut top).starts_with("n00"));
        press(&mut top, KeyCode::End);
        let end = first(&mut top);
        press(&mut top, KeyCode::PageDown);
        assert_eq!(first(&mut top), end, "the end stays the end");
        assert_eq!(top.from + top.window, lines(&top));
        // A larger window shows the end, and the lines before it.
        picture(&mut top, (80, 30)).unwrap();
        assert_eq!(top.from + top.window, lines(&top));
        press(&mut top, KeyCode::PageUp);
        picture(&mut top, (80, 30)).unwrap();
        assert_eq!(top.from + 2 * top.window - 1, lines(&top));
        press(&mut top, KeyCode::Home);
        assert!(first(&mut top).starts_with("n00"));
        assert!(press(&mut top, KeyCode::Char('q')) && press(&mut top, KeyCode::Esc));
        assert!(!press(&mut top, KeyCode::Char('x')));
    }

    #[test]
    fn free_filter_and_narrow_window_keep_within_the_width() {
        let mut top = top(cluster(256, "train"), false);
        picture(&mut top, (60, 20)).unwrap();
        let all = lines(&top);
        press(&mut top, KeyCode::Char('f'));
        let text = picture(&mut top, (60, 20)).unwrap();
        assert!(lines(&top) < all, "node n255 has no free GPU");
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        // The smallest window, and one of no height, are drawn as well.
        picture(&mut top, (1, 1)).unwrap();
    }

    #[test]
    fn slash_filters_nodes_by_name() {
        let mut top = top(cluster(60, "train"), false);
        for code in [KeyCode::Char('/'), KeyCode::Char('N'), KeyCode::Char('4'), KeyCode::Char('q')] {
            assert!(!press(&mut top, code), "letters belong to the filter");
        }
        let text = picture(&mut top, (80, 20)).unwrap();
        insta::assert_snapshot!(text.lines().last().unwrap(), @"node name contains: n4q_");
        press(&mut top, KeyCode::Backspace);
        press(&mut top, KeyCode::Enter);
        let text = picture(&mut top, (80, 30)).unwrap();
        let nodes = text.lines().filter(|line| line.trim_start().starts_with("n4")).count();
        assert!(nodes == 10 && !text.contains("n50"), "{text}");
        insta::assert_snapshot!(text.lines().last().unwrap(), @"q quit  arrows scroll  f only free  escape removes /n4  lines 1-15 of 15");
        // Escape removes the filter first, and then ends.
        assert!(!press(&mut top, KeyCode::Esc));
        assert!(picture(&mut top, (80, 20)).unwrap().contains("n00"));
        assert!(press(&mut top, KeyCode::Esc));
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        top.is_typing = true;
        assert!(top.press(control_c).is_break());
    }

    #[test]
    fn hostile_names_do_not_control_the_terminal() {
        let text = picture(&mut top(cluster(2, "\u{1b}[2J\u{1b}]0;x\u{7}"), true), (120, 12)).unwrap();
        assert!(!text.chars().any(|ch| ch.is_control() && ch != '\n'), "{text:?}");
    }

    #[test]
    fn trouble_and_missing_nodes_are_stated() {
        let mut top = top(cluster(1, "train"), false);
        top.trouble = Some("GpuNodes cannot be watched: connection refused".to_owned());
        insta::assert_snapshot!(picture(&mut top, (90, 9)).unwrap(), @r"
        gantry top  1 node, 8 GPUs: 8 free
          n00  [0 ·]─[1 ·]═[2 ·]═[3 ·] │ [4 ·]─[5 ·]═[6 ·]═[7 ·]

        1 node, 8 GPUs: 8 free
        [0 a] held by a   [1?a] granted to a   [2+a] shared, part is free   [3 ·] free
        [4~a] reserved for gang a   [5!a] a is deleted, its processes may still run   [6 x] unheal
        ═ several NVLinks to the neighbour   ─ one   │ another NUMA node

        not current: GpuNodes cannot be watched: connection refused
        ");
        top.selection.node = Some("n77".to_owned());
        top.set(cluster(1, "train"));
        insta::assert_snapshot!(picture(&mut top, (90, 9)).unwrap(), @r"
        gantry top  1 node, 8 GPUs: 8 free
        no node with GPUs is called n77; did you mean n00?






        not current: GpuNodes cannot be watched: connection refused
        ");
        let mut empty = TopView::new(Selection { node: None, gang: None, free: false }, false);
        insta::assert_snapshot!(picture(&mut empty, (90, 9)).unwrap(), @r"
        gantry top
        GpuNodes and Gangs are being listed.






        q quit  arrows scroll  f only free  / filter  lines 1-1 of 1
        ");
    }
}
